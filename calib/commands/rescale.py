"""`fp8kv bake` and `fp8kv stress`: the same model with other K and V."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from calib import choices
from calib.commands import flags
from calib.commands.running import Answer, job_command
from calib.progress import Progress

if TYPE_CHECKING:
    from calib.rescale.bake import Baked
    from calib.rescale.stress import Stressed

_DTYPE = flags.option(
    "Write changed weights in this type: the checkpoint's own (`auto`), or `float32`. Default: auto."
)


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
    plan = baked.rescaling.plan
    layers, (k, v) = len(plan.factors), plan.layers_per_head
    yield from baked.rescaling.lines()
    if baked.latent:
        yield f"one factor for the latent and one for k_pe in each of {layers} layers"
    else:
        line = f"factors per head in {k} of {layers} layers for K, in {v} for V"
        ending = f"; V of {plan.layers_without_v} of {layers} layers stays as it is"
        yield line + (ending if plan.layers_without_v else "")
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
        yield f"what was replaced is in {baked.backup}"


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
