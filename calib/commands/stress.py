"""`fp8kv stress`."""

from typing import Annotated

import typer

from calib import choices
from calib.commands.flags import (
    AsJson,
    Debug,
    Flag,
    Model,
    Output,
    Overwrite,
    ProgressFlag,
    TrustRemoteCode,
)
from calib.commands.running import command, print_json, print_lines


@command
def stress(
    context: typer.Context,
    model: Model,
    output: Output,
    k_factor: Annotated[
        str | None, Flag("Power of two for K. Default: 256. MLA: for the latent; 1/16384.")
    ] = None,
    v_factor: Annotated[
        str | None, Flag("Power of two for V. Default: 1/1024. MLA: for k_pe; as the latent's.")
    ] = None,
    dtype: Annotated[choices.DType | None, Flag("auto: the checkpoint's; or float32.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    progress: ProgressFlag = "auto",
    debug: Debug = False,
) -> None:
    """Write a model with the same outputs that needs its scales: does your engine use them?"""
    from calib.commands.overrides import overrides
    from calib.commands.progress_bar import progress_bar
    from calib.rescale.stress import parse_factor
    from calib.rescale.stress import stress as write_twin

    factors = (
        None if text is None else parse_factor(text, flag)
        for text, flag in ((k_factor, "--k-factor"), (v_factor, "--v-factor"))
    )
    options = overrides(context.params)
    with progress_bar(progress, as_json=as_json) as reported:
        twin = write_twin(model, output, *factors, overrides=options, overwrite=overwrite, progress=reported)
    if as_json:
        print_json(twin.to_json())
        return
    amax = {name: twin.amax(part) for name, part in zip(twin.parts, "kv", strict=True)}
    lines = [
        *(f"warning: {warning}" for warning in twin.warnings),
        *twin.rescaling.lines(),
        ", ".join(f"{name} amax {x['source']:.4g} -> {x['twin']:.4g}" for name, x in amax.items()),
        f"written to {twin.output}; its README.md says how to use it",
    ]
    print_lines(lines)
