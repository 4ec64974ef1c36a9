"""`fp8kv verify`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from calib.commands.flags import AsJson, Debug, Flag
from calib.commands.running import print_lines, print_table, run


def verify(
    directory: Annotated[Path, typer.Argument(help="A checkpoint with FP8 KV-cache scales.")],
    engine: Annotated[
        str | None, Flag(help="vllm, aphrodite, sglang, tgi, tensorrt-llm, lmdeploy. Default: all.")
    ] = None,
    version: Annotated[str | None, Flag(help="Of the engine. Default: the newest.")] = None,
    against: Annotated[
        Path | None, Flag(metavar="STATS", help="Statistics, or a calibration's output.")
    ] = None,
    tensor_parallel_size: Annotated[
        int, Flag(min=1, help="GPUs that the heads are split over.")
    ] = 1,
    fnuz: Annotated[bool, Flag(help="On MI300 (gfx942), whose FP8 type ends at 240.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say which engine loads which scale, without the engine; exit 1 if something is wrong."""

    def work() -> None:
        from calib.verify import verification
        from calib.verify.against import HEADINGS
        from calib.verify.place import Place
        from calib.verify.rules import choose_rules

        place = Place(tensor_parallel_size, fnuz)
        rules = choose_rules(engine, version)
        found = verification.verify_directory(directory, rules, against, place)
        if as_json:
            print(json.dumps(found.to_json()))
        else:
            rows = verification.table_rows(found)
            print_table(f"{directory}, on {place}", verification.HEADINGS, rows)
            if found.fits:
                print_table("Measured absmax", HEADINGS, verification.against_rows(found))
            print_lines(verification.closing_lines(found))
        if not found.is_good:
            raise typer.Exit(1)

    run(work, debug=debug)
