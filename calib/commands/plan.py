"""`fp8kv plan`."""

import json
from typing import Annotated

import typer

from calib.commands.flags import AsJson, Debug, Flag, TrustRemoteCode
from calib.commands.running import print_lines, print_table, run


def plan(
    model: Annotated[
        str, typer.Argument(help="A config.json, a model directory, a Hub id, builtin:smollm2.")
    ],
    gpu: Annotated[str, Flag(help="h100, h200, b200, mi300x, ...")] = "h100",
    gpus: Annotated[int, Flag(min=1, help="GPUs per node.")] = 8,
    nodes: Annotated[int, Flag(min=1)] = 1,
    samples: Annotated[int, Flag(min=1)] = 512,
    seq_len: Annotated[
        int | None, Flag(min=2, help="Tokens per sample. Default: as calibrate takes.")
    ] = None,
    batch_size: Annotated[
        int | None, Flag(min=1, help="Samples per forward pass. Default: as calibrate takes.")
    ] = None,
    disk: Annotated[str, Flag(metavar="SIZE", help="What a node reads per second.")] = "2GB",
    efficiency: Annotated[
        float, Flag(min=0.01, max=1, help="Share of the GPU's data-sheet speed that is reached.")
    ] = 0.4,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what calibrating a model takes: memory, reading, FLOPs, estimated time. Runs nothing."""

    def work() -> None:
        from calib.data import resolve_batch_size
        from calib.model.load import fit_seq_len
        from calib.plan.gpus import find_gpu
        from calib.plan.report import HEADINGS, closing_lines, make_plan, opening_lines, rows
        from calib.plan.shape import model_shape
        from calib.plan.ways import Machines, Workload
        from calib.recipe import DataRecipe
        from calib.sizes import parse_size

        machines = Machines(find_gpu(gpu), gpus, nodes, parse_size(disk), efficiency)
        shape = model_shape(model, trust_remote_code=trust_remote_code)
        asked = seq_len or DataRecipe().seq_len
        tokens, notes = fit_seq_len(shape.config, asked, given=seq_len is not None)
        data = DataRecipe(samples=samples, batch_size=batch_size or "auto")
        data = data.model_copy(update={"seq_len": tokens})
        workload = Workload(samples, tokens, resolve_batch_size(data, "cuda"))
        made = make_plan(model, shape, workload, machines)
        if as_json:
            print(json.dumps(made.to_json()))
            return
        print_lines([*opening_lines(made), *(f"note: {note}" for note in notes)])
        title = f"{model} on {nodes} x {gpus} {gpu}"
        print_table(title, HEADINGS, rows(made))
        print_lines(closing_lines(made))

    run(work, debug=debug)
