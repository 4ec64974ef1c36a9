"""`fp8kv bake`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calib import choices
from calib.commands.flags import (
    AsJson,
    Debug,
    Flag,
    Model,
    OutputFlag,
    Overwrite,
    ProgressFlag,
    TrustRemoteCode,
)
from calib.commands.running import command, print_json, print_lines

if TYPE_CHECKING:
    from calib.rescale.bake import Baked

_HEADS = ("K of some heads", "V of some heads")


@command
def bake(
    context: typer.Context,
    model: Model,
    scales: Annotated[Path, Flag("A calibration of MODEL: its output, or its statistics.", "--scales")],
    purpose: Annotated[choices.Purpose, Flag("fp8: scale 1.0 becomes right. int8: even channels.", "--for")],
    output: Annotated[Path | None, Flag("Default: ./<model>-baked-<for>.", "-o", "--output")] = None,
    in_place: Annotated[
        bool, OutputFlag("Change the model's own directory; back up its files.", "--in-place")
    ] = False,
    dtype: Annotated[choices.DType | None, Flag("auto: the checkpoint's; or float32.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    progress: ProgressFlag = "auto",
    debug: Debug = False,
) -> None:
    """Change weights so that an engine without scales holds K and V well; outputs stay the same."""
    from calib.commands.overrides import overrides
    from calib.commands.progress_bar import progress_bar
    from calib.rescale.bake import bake as bake_model

    with progress_bar(progress, as_json=as_json) as reported:
        baked = bake_model(
            model,
            scales,
            purpose,
            output,
            in_place=in_place,
            overrides=overrides({**context.params, "scales": None}),
            overwrite=overwrite,
            progress=reported,
        )
    if as_json:
        print_json(baked.to_json())
        return
    print_lines(
        [
            *baked.rescaling.lines(),
            _factors_line(baked),
            f"written to {baked.output}; its README.md says how to serve it",
            *(f"warning: {warning}" for warning in baked.warnings),
            *_unchanged_lines(baked.rescaling.plan.unchanged_layers),
            *(_missing_lines(baked) if purpose == "fp8" else []),
            *([f"what was replaced is in {baked.backup}"] if baked.backup else []),
        ]
    )


def _factors_line(baked: "Baked") -> str:
    plan = baked.rescaling.plan
    layers, (k, v) = len(plan.factors), plan.layers_per_head
    if baked.latent:
        return f"one factor for the latent and one for k_pe in each of {layers} layers"
    line = f"factors per head in {k} of {layers} layers for K, in {v} for V"
    if plan.layers_without_v:
        line += f"; V of {plan.layers_without_v} of {layers} layers stays as it is"
    return line


def _unchanged_lines(layers: Mapping[str, str]) -> list[str]:
    first = [f"{name}: {reason}" for name, reason in layers.items()][:1]
    return [f"note: {len(layers)} layers stay as they are, the first of them {x}" for x in first]


def _missing_lines(baked: "Baked") -> list[str]:
    parts = ("the latent of some layers", "k_pe of some layers") if baked.latent else _HEADS
    return [
        f"note: {part} stays up to 2^{octaves:.0f} smaller than an FP8 cache holds "
        "best: its weights hold no larger factors"
        for part, octaves in zip(parts, baked.rescaling.plan.missing_octaves("fp8"), strict=True)
        if octaves >= 1
    ]
