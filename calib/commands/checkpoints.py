"""`fp8kv apply`, `merge`, `convert`, `strip`, `repair`, `pack`, `bake`, `stress`: checkpoints from others."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import typer

from calib import choices
from calib.commands import flags
from calib.commands.calibrate import result_blocks
from calib.commands.running import Answer, job_command
from calib.errors import InputError
from calib.files.names import CALIBRATION_FILE, STATS_FILE
from calib.progress import Progress

if TYPE_CHECKING:
    from calib.rescale.bake import Baked
    from calib.rescale.stress import Stressed
    from calib.transfer.convert import Conversion
    from calib.transfer.pack import WrittenPack


_CHECKPOINT = typer.Argument(
    ..., help="A checkpoint with KV-cache scales that any tool wrote.", metavar="DIRECTORY"
)

_DTYPE = flags.option(
    "Write changed weights in this type: the checkpoint's own (`auto`), or `float32`. Default: auto."
)


@job_command
def apply(
    calibration: str = typer.Argument(
        ...,
        metavar="OUTPUT",
        help="The scales: an output of calibrate, its statistics, or a pack. A pack on the Hub is "
        "OWNER/NAME or OWNER/NAME@REVISION.",
    ),
    model: str = flags.MODEL,
    output: Path | None = flags.option(
        "Write to this directory. Default: ./<model>-fp8kv-<strategy>.", "-o", "--output", metavar="DIR"
    ),
    in_place: bool = flags.IN_PLACE,
    format: choices.FormatName = flags.option("Write this format.", default="vllm"),
    strategy: choices.Strategy | None = flags.option(
        "Choose which values share a scale. Default: as calibrated."
    ),
    *,
    overwrite: bool,
    progress: Progress,
) -> Answer:
    """Put the scales of a calibration into another checkpoint of its model, without running it.

    MODEL may be a quantised version. It is refused if a sample of the weights
    that K and V come from differs. Weights that were not compared (down_proj,
    most experts) are named.
    """
    from calib.transfer.apply import apply as apply_scales

    result = apply_scales(
        calibration, model, output, in_place=in_place, format=format, strategy=strategy,
        overwrite=overwrite, progress=progress,
    )  # fmt: skip
    return Answer(result.to_json(), result_blocks(result))


@job_command
def merge(
    directories: list[Path] = typer.Argument(
        ..., help="Two or more outputs of calibrate, or of FP8KV_WATCH, of one model.", metavar="OUTPUT..."
    ),
    output: Path = flags.OUTPUT,
    model: str | None = flags.option("Find the model here. Default: where the first calibration found it."),
    *,
    overwrite: bool,
    progress: Progress,
) -> Answer:
    """Merge the statistics of several calibrations, as if one run had read all their data.

    Rows that two runs read from files of different names count twice, and nothing warns of it. Statistics
    of running engines (FP8KV_WATCH) become statistics again, for `fp8kv repair --stats`.
    """
    from calib.transfer.merge import merge as merge_runs
    from calib.transfer.merge import merge_statistics

    if model is None and not any((path / CALIBRATION_FILE).exists() for path in directories):
        stats = merge_statistics(directories, output, overwrite=overwrite)
        advice = f"new scales: fp8kv repair DIR --stats {quote(str(output))}"
        line = f"{output}: statistics of {stats.tokens:,} tokens; {advice}"
        return Answer({"output": str(output), "tokens": stats.tokens, "layers": len(stats.layers)}, [line])
    result = merge_runs(directories, output, model=model, overwrite=overwrite, progress=progress)
    return Answer(result.to_json(), result_blocks(result))


@job_command
def convert(
    directory: Path = _CHECKPOINT,
    to: choices.FormatName = flags.option("Write this format.", default=...),
    output: Path = flags.OUTPUT,
    reduce: choices.Reduce = flags.option(
        "Keep all scales (`none`), or write only the largest of each layer (`max`).", default="none"
    ),
    without_q: bool = flags.option("Leave query scales out.", "--without-q", default=False),
    tp_size: int = flags.option(
        "Write kv_cache_scales.json for this many tensor-parallel ranks.", min=1, default=1
    ),
    skip_layers: str | None = flags.option(
        "Leave these layers in 16 bits, such as 0,7: config.json names them to our plugin. '' for none.",
        metavar="INDICES",
    ),
    *,
    overwrite: bool,
    progress: Progress,
) -> Answer:
    """Write the scales of a checkpoint in another engine's format, with the same bits.

    Format `sglang-nvfp4` holds a sixth of each scale, rounded to float32. Format `json` holds one scale for K
    and V: the larger of the two.
    """
    from calib.transfer.convert import convert as convert_scales

    skipped = None
    if skip_layers is not None:
        parts = filter(None, map(str.strip, skip_layers.split(",")))
        skipped = [int(index) if index.isdecimal() else index for index in parts]
    conversion = convert_scales(
        directory, to, output, reduce=reduce, without_q=without_q, tp_size=tp_size,
        skip_layers=skipped,
        overwrite=overwrite, progress=progress,
    )  # fmt: skip
    count = len(conversion.scales.layers)
    line = f"{count} layer{'' if count == 1 else 's'} written to {output}, format {to}"
    document = {"output": str(output), "format": to, "layers": count, "warnings": conversion.warnings}
    return Answer(document, [*_warning_lines(conversion, to, reduce), line])


@job_command
def strip(
    directory: Path = _CHECKPOINT, output: Path = flags.OUTPUT, *, overwrite: bool, progress: Progress
) -> Answer:
    """Write a checkpoint without its KV-cache scales, and without the config that announces them."""
    from calib.transfer.strip import strip as strip_scales

    had_scales = strip_scales(directory, output, overwrite=overwrite, progress=progress)
    line = f"written to {output}; note: {directory} held no KV-cache scales to take out"
    if had_scales:
        line = f"written to {output}, without KV-cache scales"
    return Answer({"output": str(output), "had_scales": had_scales}, [line])


@job_command
def repair(
    directory: Path = _CHECKPOINT,
    stats: Path | None = flags.option(
        "Take the measured absmax from these statistics, or this output of calibrate. Required."
    ),
    output: Path = flags.OUTPUT,
    to: choices.FormatName = flags.option("Write this format.", default="vllm"),
    *,
    overwrite: bool,
    progress: Progress,
) -> Answer:
    """Replace scales that are missing, useless, or contradicted by measured absmax.

    So are the scales of a layer whose shape differs from that of most layers.
    The exit status is 1 if `fp8kv verify --against` still finds a problem.
    """
    from calib.transfer.repair import repair as repair_scales

    if stats is None:
        own = directory / STATS_FILE
        flag = f"--stats {quote(str(own))}" if own.exists() else "--stats OUTPUT, an output of calibrate"
        raise InputError(f"repair replaces scales by measured absmax; add {flag}")
    result = repair_scales(directory, stats, to, output, overwrite=overwrite, progress=progress)
    replacements = [replacement for replacement in result.replacements if replacement.new != replacement.old]
    lines = [f"replaced: {replacement}" for replacement in replacements] + result.name_changes
    lines = lines or ["replaced: nothing"]
    lines += [*_warning_lines(result, to), f"written to {output}"]
    lines += [f"not mended: {problem}" for problem in result.problems]
    replaced = [asdict(replacement) for replacement in replacements]
    document = {"output": str(output), "format": to, "replaced": replaced, "names": result.name_changes}
    document |= {"warnings": result.warnings, "problems": result.problems}
    return Answer(document, lines, is_good=not result.problems)


def _warning_lines(
    conversion: "Conversion", to: choices.FormatName, reduce: choices.Reduce = "none"
) -> list[str]:
    from calib.formats import FORMATS
    from calib.formats.card import written_strategy

    strategy = written_strategy(conversion.scales.strategy, reduce)
    note = FORMATS[to].note_on(strategy).replace("--format", "--to")
    lines = [f"warning: {warning}" for warning in conversion.warnings]
    return [*lines, f"note ({to}): {note}"] if note else lines


@job_command
def pack(
    calibration: Path = typer.Argument(
        ..., metavar="OUTPUT", help="An output of calibrate, or its statistics."
    ),
    output: Path = flags.OUTPUT,
    report: Path | None = flags.option(
        "Add this report of `fp8kv eval`. Default: the one in OUTPUT/evaluation."
    ),
    base_model: str | None = flags.option(
        "Name the model on the Hub, where a local copy was calibrated.", metavar="ID"
    ),
    push_to_hub: str | None = flags.output("Upload the pack to the Hub as OWNER/NAME.", metavar="NAME"),
    private: bool = flags.output("Make the upload private.", "--private", default=False),
    *,
    overwrite: bool,
) -> Answer:
    """Write a calibration without weights, in kilobytes, for people who have the model.

    `fp8kv apply` puts its scales into their copy, from a directory or the Hub.
    """
    from calib.transfer.hub import check_hub_id, push
    from calib.transfer.pack import pack as write_pack

    if private and push_to_hub is None:
        raise InputError("--private is for --push-to-hub; leave it out")
    if push_to_hub is not None:
        check_hub_id("--push-to-hub", push_to_hub)
    result = write_pack(calibration, output, report=report, base_model=base_model, overwrite=overwrite)
    pushed = push(output, push_to_hub, private=private) if push_to_hub else None
    document = {"output": str(output), "files": result.sizes, "pushed": pushed, "warnings": result.warnings}
    return Answer(document, _pack_lines(result, output, pushed, push_to_hub or str(output)))


def _pack_lines(result: "WrittenPack", output: Path, pushed: str | None, name: str) -> Iterator[str]:
    yield from (f"warning: {warning}" for warning in result.warnings)
    for file, size in result.sizes.items():
        yield f"{size:>11,} bytes  {file}"
    yield f"written to {output}: {sum(result.sizes.values()):,} bytes, without weights"
    if pushed:
        yield f"pushed to {pushed}"
    yield from ("", "put its scales beside a model:")
    yield f"  fp8kv apply {quote(name)} {quote(result.pack.base_model or 'MODEL')}"


@job_command
def bake(
    context: typer.Context,
    model: str = flags.MODEL,
    scales: Path = flags.option(
        "Use this calibration of MODEL: an output of calibrate, or its statistics.", "--scales", default=...
    ),
    purpose: choices.Purpose = flags.option(
        "Make scale 1.0 right (`fp8`), or the channels of a head alike (`int8`).", "--for", default=...
    ),
    output: Path | None = flags.option(
        "Write to this directory. Default: ./<model>-baked-<for>.", "-o", "--output", metavar="DIR"
    ),
    in_place: bool = flags.IN_PLACE,
    dtype: choices.DType | None = _DTYPE,
    trust_remote_code: bool = flags.TRUST_REMOTE_CODE,
    *,
    overwrite: bool,
    progress: Progress,
) -> Answer:
    """Change weights so that an engine without scales holds K and V well. The outputs stay the same."""
    from calib.rescale.bake import bake as bake_model

    keys = flags.recipe_keys({**context.params, "scales": None})
    baked = bake_model(
        model, scales, purpose, output, in_place=in_place, overrides=keys, overwrite=overwrite,
        progress=progress,
    )  # fmt: skip
    return Answer(baked.to_json(), _baked_lines(baked, purpose))


def _baked_lines(baked: "Baked", purpose: choices.Purpose) -> Iterator[str]:
    from calib.formats.card import backup_line

    plan = baked.rescaling.plan
    layers, (k, v) = len(plan.factors), plan.layers_per_head
    yield from baked.rescaling.lines()
    if baked.latent:
        yield f"one factor for the latent and one for k_pe in each of {layers} layers"
    else:
        line = f"heads have factors of their own in {k} of {layers} layers for K and {v} for V"
        if min(k, v) < layers:
            line += "; in the others they need the same powers of two, or the weights hold no more"
        yield line
        if plan.layers_without_v:
            yield f"V of {plan.layers_without_v} of {layers} layers stays as it is"
    yield f"written to {baked.output}; its README.md says how to serve it"
    yield from (f"warning: {warning}" for warning in baked.warnings)
    for name, reason in [*plan.unchanged_layers.items()][:1]:
        count = len(plan.unchanged_layers)
        yield f"note: layers that stay as they are: {count}, the first of them {name}: {reason}"
    parts = ("the latent of", "k_pe of") if baked.latent else ("K of", "V of")
    units = "layers" if baked.latent else "heads"
    for part, octaves in zip(parts, plan.missing_octaves("fp8") if purpose == "fp8" else (0, 0), strict=True):
        if octaves >= 1:
            yield (
                f"note: {part} some {units} stays up to 2^{octaves:.0f} smaller than an FP8 cache holds "
                "best: its weights hold no larger factors"
            )
    if baked.backup:
        yield backup_line(baked.output, baked.backup)


@job_command
def stress(
    context: typer.Context,
    model: str = flags.MODEL,
    output: Path = flags.OUTPUT,
    k_factor: str | None = flags.option(
        "Multiply K by this power of two. Default: 256. In a model with MLA, multiply the latent; "
        "default: 1/16384."
    ),
    v_factor: str | None = flags.option(
        "Multiply V by this power of two. Default: 1/1024. In a model with MLA, multiply k_pe; "
        "default: the latent's factor."
    ),
    dtype: choices.DType | None = _DTYPE,
    trust_remote_code: bool = flags.TRUST_REMOTE_CODE,
    *,
    overwrite: bool,
    progress: Progress,
) -> Answer:
    """Write a twin of a model whose outputs are the same, but only if an engine uses its scales."""
    from calib.rescale.stress import parse_factor
    from calib.rescale.stress import stress as write_twin

    k, v = (
        None if text is None else parse_factor(text, flag)
        for text, flag in ((k_factor, "--k-factor"), (v_factor, "--v-factor"))
    )
    options = flags.recipe_keys(context.params)
    twin = write_twin(model, output, k, v, overrides=options, overwrite=overwrite, progress=progress)
    return Answer(twin.to_json(), _twin_lines(twin))


def _twin_lines(twin: "Stressed") -> Iterator[str]:
    amax = {name: twin.amax(part) for name, part in zip(twin.parts, "kv", strict=True)}
    yield from (f"warning: {warning}" for warning in twin.warnings)
    yield from twin.rescaling.lines()
    yield ", ".join(f"{name} amax {x['source']:.4g} -> {x['twin']:.4g}" for name, x in amax.items())
    yield f"written to {twin.output}; its README.md says how to use it"
