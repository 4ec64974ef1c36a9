"""`fp8kv repair`: scales that measured absmax contradicts, or that are missing, made of it."""

from dataclasses import dataclass, replace
from pathlib import Path

from calib.capture.directory_scales import to_scales
from calib.choices import FormatName, FP8Name
from calib.engines.catalogue import choose_engines
from calib.engines.fit import Scale, contradictions
from calib.engines.measured import MeasuredAmax, measured_amax
from calib.engines.verification import verify_directory
from calib.errors import UnsupportedExportError
from calib.files.calibration import statistics_file
from calib.files.config import head_counts, layer_config
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.stored_scales import StoredLayer, StoredScales, Values, is_usable, read_scales
from calib.files.text import show_layers
from calib.formats import FORMATS
from calib.formats.directory import check_output
from calib.progress import SILENT, Progress
from calib.same_model.check import LayerFacts, ModelFacts, check_same_model, model_facts, scales_facts
from calib.scales.observers import AbsMax
from calib.scales.stats import KVStats, LayerStats
from calib.scales.stats_file import load_records, load_stats
from calib.transfer.convert import Rewritten, write_scales

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
    statistics_file(statistics)
    measured_facts = scales_facts(statistics)
    scales, stats = read_scales(directory), load_stats(statistics)
    check_same_model(measured_facts, model_facts(checkpoint, stats.layers))
    by_layer = {layer.layer_idx: layer for layer in stats.layers.values()}
    by_layer |= {each.layer_idx: stats.layers[each.owner] for each in stats.shared.values()}
    layers = scales.layers_by_module()
    measured_layers = {
        index: {"K heads": {len(layer.k.amax)}, "K channels": {layer.k.amax.numel()}}
        for index, layer in by_layer.items()
    }
    stored_layers = _stored_layers(by_layer, layers, scales, checkpoint)
    check_same_model(
        replace(measured_facts, layers=measured_layers),
        ModelFacts(str(directory), layers=stored_layers),
        "give statistics of this model",
    )
    measured = measured_amax(stats, statistics, [*layers.values()])
    replaced = _replace(scales, layers, measured, by_layer)
    made = to_scales(replace(scales, layers=[*layers.values()]), layers, scales.fp8_dtype)
    where = (output, overwrite, progress)
    count = sum(x is not None for each in layers.values() for x in (each.k, each.v, each.q))
    own = load_records(directory) if len(replaced) < count else ()
    read = (*own, *stats.records)
    notes = write_scales(made, checkpoint, to, read, *where, command="repair")
    told = verify_directory(output, choose_engines(None, None), statistics)
    notes += (*_left_out(scales, layers), *told.warnings)
    if not (told.problems or told.is_good):
        notes += ("fp8kv verify knows of no engine that loads all of these scales",)
    return Repaired(made, notes, replaced, told.problems)


def _replace(
    scales: StoredScales,
    layers: dict[str, StoredLayer],
    measured: MeasuredAmax,
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
    layers: dict[str, StoredLayer], measured: MeasuredAmax, per_head: str, fp8_dtype: FP8Name
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


def _per_head(layers: dict[str, StoredLayer], measured: MeasuredAmax) -> str:
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


def _stored_layers(
    measured: dict[int, LayerStats],
    layers: dict[str, StoredLayer],
    scales: StoredScales,
    source: ModelDirectory,
) -> dict[int, LayerFacts]:
    """Collect the heads that scales or the config allow, and the channels of the weights for K.

    Scales for other heads are wrong where the config names those that were measured.
    """
    counts = {len(values) for layer in layers.values() for values in (layer.k, layer.v) if values} - {1}
    are_doubtful = bool(counts) and counts.isdisjoint(len(layer.k.amax) for layer in measured.values())
    facts = dict[int, LayerFacts]()
    for module, layer in layers.items():
        shapes, weight = dict[str, set[int]](), source.entries.get(f"{module}.k_proj.weight")
        if are_doubtful:
            config = layer_config(scales.directory.text_config, layer.layer)
            shapes["K heads"] = counts | head_counts(config, "k")
        if weight and weight.dtype in _UNPACKED:
            shapes["K channels"] = {weight.shape[0]}
        facts[layer.layer] = shapes
    return facts


def _shown(values: Values | None) -> str:
    if not values:
        return "missing"
    shown = ", ".join(f"{value:.4g}" for value in values[:8])
    more = f" and {len(values) - 8} more" if len(values) > 8 else ""
    return shown + more if len(values) == 1 else f"[{shown}{more}]"
