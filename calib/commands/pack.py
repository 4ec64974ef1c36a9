"""`fp8kv pack`."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from calib.commands.flags import AsJson, Debug, Flag, Output, OutputFlag, Overwrite
from calib.commands.running import command, print_json, print_lines, warn
from calib.errors import InputError

if TYPE_CHECKING:
    from calib.transfer.pack import WrittenPack


@command
def pack(
    calibration: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="A calibration's output, or its statistics.")
    ],
    output: Output,
    report: Annotated[
        Path | None, Flag("What fp8kv-eval wrote of these scales. Default: OUTPUT/evaluation.")
    ] = None,
    base_model: Annotated[
        str | None, Flag("The model's Hub id, where a copy was calibrated.", metavar="ID")
    ] = None,
    push_to_hub: Annotated[str | None, OutputFlag("Upload to the Hub as owner/name.", metavar="NAME")] = None,
    private: Annotated[bool, OutputFlag("With --push-to-hub: for you alone.", "--private")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a calibration without weights, in kilobytes, for others who have the model.

    `fp8kv apply` puts its scales beside their copy, from the directory or from the Hub.
    """
    from calib.transfer.hub import check_hub_id, push
    from calib.transfer.pack import pack as write_pack

    if private and push_to_hub is None:
        raise InputError("--private is for --push-to-hub; leave it out")
    if push_to_hub is not None:
        check_hub_id("--push-to-hub", push_to_hub)
    packed = write_pack(calibration, output, report=report, base_model=base_model, overwrite=overwrite)
    pushed = push(output, push_to_hub, private=private) if push_to_hub else None
    if as_json:
        print_json(
            {
                "output": str(output),
                "files": packed.sizes,
                "pushed": pushed,
                "warnings": packed.warnings,
            }
        )
        return
    warn(packed.warnings)
    print_lines(_lines(packed, output, pushed, push_to_hub or str(output)))


def _lines(packed: "WrittenPack", output: Path, pushed: str | None, name: str) -> list[str]:
    lines = [f"{size:>11,} bytes  {file}" for file, size in packed.sizes.items()]
    lines += [f"written to {output}: {sum(packed.sizes.values()):,} bytes, without weights"]
    lines += [f"pushed to {pushed}"] if pushed else []
    model = packed.pack.base_model or "MODEL"
    return [*lines, "", "put its scales beside a model:", f"  fp8kv apply {quote(name)} {model}"]
