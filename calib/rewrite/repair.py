"""`fp8kv repair`: scales that measured absmax contradicts, or that are missing, made of it."""

from dataclasses import dataclass, replace
from pathlib import Path

from calib.capture.any_scales import to_scales
from calib.choices import FormatName, FP8Name
from calib.errors import InputError, UnsupportedExportError
from calib.export import FORMATS
from calib.files.calibration import statistics_file
from calib.files.config import head_counts, layer_config
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.stored_scales import StoredLayer, StoredScales, Values, is_usable, read_scales
from calib.files.text import show_layers
from calib.output.checkpoint_directory import check_output
from calib.progress import SILENT, Progress
from calib.rewrite.convert import Rewritten, write_scales
from calib.same_model.identity import check_same_model, identity
from calib.same_model.saved import check_measured_on
from calib.scales.observers import AbsMax
from calib.scales.stats import KVStats, LayerStats
from calib.scales.stats_file import load_stats
from calib.scales.text_records import load_records, records_of
from calib.verify.fit import Scale, contradictions
from calib.verify.measured import Measured, measured_of
from calib.verify.rules import choose_rules
from calib.verify.verification import verify_directory

# weights with a row per channel
_UNPACKED = ("F32", "F16", "BF16", "F8_E4M3")


@dataclass(frozen=True)
class Replaced:
    """One scale, or those of a layer's heads, before and after."""

    module: str
    letter: str
    old: Values | None
    new: Values

    def __str__(self) -> str:
        return f"{self.module} {self.letter}: {_shown(self.old)}, now {_shown(self.new)}"


@dataclass(frozen=True)
class Repaired(Rewritten):
    """What was written, and what is wrong with it still."""

    replaced: list[Replaced]
    left: list[str]  # problems that `fp8kv verify --against` tells of the output


def repair(
    directory: Path,
    statistics: Path,
    to: FormatName,
    output: Path,
    *,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Repaired:
    """Write the checkpoint with scales of measured absmax where its own do not fit that."""
    if FORMATS[to].nvfp4:
        raise UnsupportedExportError(
            f"--to {to}: repair mends FP8 scales, which need not be absmax / 448; calibrate the "
            f"model again with --format {to}"
        )
    checkpoint = open_model_directory(directory)
    check_output(output, directory, overwrite=overwrite)
    source = statistics_file(statistics).parent
    check_same_model(statistics, identity(source), directory, checkpoint.config)
    scales, stats = read_scales(directory), load_stats(statistics)
    check_measured_on(statistics, stats.layers, checkpoint)
    by_layer = {layer.layer_idx: layer for layer in stats.layers.values()}
    by_layer |= {each.layer_idx: stats.layers[each.owner] for each in stats.shared.values()}
    layers = scales.layers_by_module()
    _check_shapes(by_layer, layers, statistics, scales, checkpoint)
    measured = measured_of(stats, statistics, [*layers.values()])
    replaced = _replace(scales, layers, measured, by_layer)
    made = to_scales(replace(scales, layers=[*layers.values()]), layers, scales.fp8_dtype)
    where = (output, overwrite, progress)
    count = sum(x is not None for each in layers.values() for x in (each.k, each.v, each.q))
    own = load_records(directory) if len(replaced) < count else ()
    read = (*own, *records_of(stats))
    notes = write_scales(made, checkpoint, to, read, *where, reduce=None, tp_size=1)
    told = verify_directory(output, choose_rules(None, None), statistics)
    notes += (*_left_out(scales, layers), *told.warnings)
    if not (told.problems or told.is_good):
        notes += ("fp8kv verify knows of no engine that loads all of these scales",)
    return Repaired(made, notes, replaced, told.problems)


def _replace(
    scales: StoredScales,
    layers: dict[str, StoredLayer],
    measured: Measured,
    by_layer: dict[int, LayerStats],
) -> list[Replaced]:
    """Put scales of measured absmax into `layers` where theirs do not fit that."""
    per_head, replaced = _per_head(layers, measured), list[Replaced]()
    wrong = _wrong(layers, measured, per_head, scales.fp8_dtype)
    before = {layer.layer: layer for layer in scales.layers}
    for module, layer in layers.items():
        stats = by_layer[layer.layer]
        letters = "".join(x for x in "kvq" if (layer.layer, x) in wrong)
        # a latent and k_pe have one scale
        for letter in "kv" if letters and stats.latent else letters:
            derived = KVStats({module: stats}).scales(
                strategy="attn_head" if letter in per_head else "tensor",
                observer=AbsMax(),
                fp8_dtype=scales.fp8_dtype,
                targets="qkv" if letter == "q" else "kv",
            )
            old = getattr(before.get(layer.layer, layer), letter)
            new = tuple(getattr(derived.layers[module], letter).tolist())
            setattr(layer, letter, new)
            replaced.append(Replaced(module, letter, old, new))
    return replaced


def _wrong(
    layers: dict[str, StoredLayer], measured: Measured, per_head: str, fp8_dtype: FP8Name
) -> set[Scale]:
    """Which scales are missing, of no use, all 1.0, of another shape or contradicted."""
    has_q = any(layer.q for layer in layers.values())
    every = [(layer, x) for layer in layers.values() for x in ("kvq" if has_q else "kv")]
    every = [(layer, x) for layer, x in every if (layer.layer, x) in measured.amax]
    wrong = {(layer.layer, x) for layer, x in every if not is_usable(getattr(layer, x))}
    for letter in "kvq":
        values = {x for layer in layers.values() for x in getattr(layer, letter) or ()}
        if values == {1.0} and len(layers) > 1:
            wrong |= {(layer.layer, x) for layer, x in every if x == letter}
    for layer, x in every:
        count = len(measured.amax[layer.layer, x]) if x in per_head else 1
        if len(getattr(layer, x) or ()) != count:
            wrong.add((layer.layer, x))
    right = {(layer.layer, x): getattr(layer, x) for layer, x in every}
    right |= dict.fromkeys(wrong)
    rest = [
        StoredLayer(i, right.get((i, "k")), right.get((i, "v")), right.get((i, "q")))
        for i in (layer.layer for layer in layers.values())
    ]
    for finding in contradictions(rest, measured, fp8_dtype):
        wrong |= finding.scales
    return wrong & right.keys()


def _per_head(layers: dict[str, StoredLayer], measured: Measured) -> str:
    """The letters of which most layers have a scale per head; Q only where K and V have."""

    def mostly(letters: str) -> bool:
        counts = [
            len(values) > 1
            for layer in layers.values()
            for letter in letters
            if (values := getattr(layer, letter)) and len(measured.amax.get((layer.layer, letter), ())) > 1
        ]
        return 2 * sum(counts) > len(counts)

    return "" if not mostly("kv") else "kvq" if mostly("q") else "kv"


def _left_out(scales: StoredScales, layers: dict[str, StoredLayer]) -> list[str]:
    """Say which query scales are gone."""
    kept = {layer.layer for layer in layers.values() if layer.q}
    gone = [layer.layer for layer in scales.layers if layer.q and layer.layer not in kept]
    return [f"query scales of no use are left out in {show_layers(gone)}"] if gone else []


def _check_shapes(
    measured: dict[int, LayerStats],
    layers: dict[str, StoredLayer],
    shown: Path,
    scales: StoredScales,
    source: ModelDirectory,
) -> None:
    """Refuse statistics whose layers, heads or channels are not those of the checkpoint."""
    sizes = {len(x) for layer in layers.values() for x in (layer.k, layer.v) if x} - {1}
    heads = {index: len(layer.k.amax) for index, layer in measured.items()}
    # scales for other heads are wrong where the config names those of the statistics
    config = scales.directory.text_config
    fits = all(count in head_counts(layer_config(config, i), "k") for i, count in heads.items())
    other = bool(sizes) and not sizes & {*heads.values()} and not fits
    if measured.keys() != {layer.layer for layer in layers.values()} or other:
        raise InputError(
            f"'{shown}' is of another model: it has {len(measured)} layers of "
            f"{_listed({*heads.values()})} KV heads, '{source.path}' has {len(layers)} layers with "
            f"{_listed(sizes or {1})} scales each"
        )
    for module, layer in layers.items():
        values, weight = measured[layer.layer].k.amax, source.entries.get(f"{module}.k_proj.weight")
        if weight and weight.dtype in _UNPACKED and weight.shape[0] != values.numel():
            raise InputError(
                f"'{shown}' is of another model: K of layer {layer.layer} has {values.numel()} "
                f"channels, and {weight.shape[0]} in '{source.path}'"
            )


def _listed(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _shown(values: Values | None) -> str:
    if not values:
        return "missing"
    shown = ", ".join(f"{value:.4g}" for value in values[:8])
    more = f" and {len(values) - 8} more" if len(values) > 8 else ""
    return shown + more if len(values) == 1 else f"[{shown}{more}]"
