"""`fp8kv plan`."""

from typing import TYPE_CHECKING, Annotated

import typer

from calib.commands.flags import AsJson, DataFlag, Debug, Flag, ResourcesFlag, TrustRemoteCode
from calib.commands.running import command, print_json, print_lines, print_table
from calib.files.text import parse_size, show_duration, show_size

if TYPE_CHECKING:
    from calib.plan.ways import Plan, Way

_HEADINGS = ("way", "processes", "each GPU", "read per node", "hidden states", "time")


@command
def plan(
    model: Annotated[
        str, typer.Argument(help="A config.json, a model directory, a Hub id, builtin:smollm2.")
    ],
    gpu: Annotated[str, Flag("h100, h200, b200, mi300x, ...")] = "h100",
    gpus: Annotated[int, Flag("GPUs per node.", min=1)] = 8,
    nodes: Annotated[int, Flag("Number of nodes.", min=1)] = 1,
    samples: Annotated[int, DataFlag("Number of samples.", min=1)] = 512,
    seq_len: Annotated[int | None, DataFlag("Tokens per sample. Default: as calibrate takes.", min=2)] = None,
    batch_size: Annotated[
        int | None, DataFlag("Samples per forward pass. Default: as calibrate takes.", min=1)
    ] = None,
    disk: Annotated[str, ResourcesFlag("Bytes a node reads per second.", metavar="SIZE")] = "2GB",
    efficiency: Annotated[
        float, ResourcesFlag("Share of the GPU's data-sheet speed reached.", min=0.01, max=1)
    ] = 0.4,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what calibrating a model takes: memory, reading, FLOPs, estimated time. Runs nothing."""
    from calib.data import resolve_batch_size
    from calib.models.config import fit_seq_len
    from calib.plan.shape import model_shape
    from calib.plan.ways import Machines, Plan, Workload, find_gpu, ways
    from calib.recipe import DataRecipe

    machines = Machines(find_gpu(gpu), gpus, nodes, parse_size(disk), efficiency)
    shape = model_shape(model, trust_remote_code=trust_remote_code)
    asked = seq_len or DataRecipe().seq_len
    tokens, notes = fit_seq_len(shape.config, asked, is_default=seq_len is None)
    data = DataRecipe(samples=samples, batch_size=batch_size or "auto")
    data = data.model_copy(update={"seq_len": tokens})
    work = Workload(samples, tokens, resolve_batch_size(data, "cuda"))
    made = Plan(model, shape, work, machines, ways(shape, work, machines))
    if as_json:
        print_json(made.to_json())
        return
    print_lines([*_opening_lines(made), *(f"note: {note}" for note in notes)])
    print_table(f"{model} on {nodes} x {gpus} {gpu}", _HEADINGS, [_row(way) for way in made.ways])
    print_lines(_closing_lines(made))


def _row(way: "Way") -> tuple[str, ...]:
    return (
        way.name,
        f"{way.nodes} x {way.processes}",
        show_size(way.gpu_bytes),
        show_size(way.disk_read),
        show_size(way.hidden_bytes) if way.hidden_bytes else "-",
        show_duration(way.seconds) if way.fits else "does not fit",
    )


def _opening_lines(plan: "Plan") -> list[str]:
    """Size of the model, and cost of one pass."""
    shape, work = plan.shape, plan.work
    tokens = work.samples * work.seq_len
    flops = shape.flops(work.samples, work.seq_len)
    return [
        f"{shape.parameters / 1e9:.2f} billion parameters, {show_size(shape.weight_bytes)} as "
        f"{str(shape.dtype).removeprefix('torch.')}; {len(shape.layers)} layers, the largest "
        f"{show_size(shape.layer_bytes)}",
        f"KV cache: {2 * shape.cached_values:,} bytes per token in 16 bits, {shape.cached_values:,} in FP8",
        f"{work.samples} samples of {work.seq_len} tokens: {tokens:,} tokens, {flops:.3g} FLOPs",
    ]


def _closing_lines(plan: "Plan") -> list[str]:
    """The command to type, and the assumptions."""
    machines, best = plan.machines, plan.ways[0]
    assumed = (
        f"Times assume {machines.efficiency:.0%} of the GPU's data-sheet speed and "
        f"{machines.disk / 1e9:g} GB/s of disk per node; they are estimates, nothing was run."
    )
    if not best.fits:
        return ["No way fits: give GPUs with more memory, or a smaller --batch-size.", assumed]
    return [_command_line(plan, best), assumed]


def _command_line(plan: "Plan", way: "Way") -> str:
    work = plan.work
    flags = f"--samples {work.samples} --seq-len {work.seq_len} --batch-size {work.batch_size}"
    model = "MODEL" if plan.model.endswith(".json") else plan.model
    job = f"calibrate {model} {flags} --offload {way.offload}"
    if way.nodes * way.processes == 1:
        return f"fp8kv {job}"
    nodes = f" --nnodes {way.nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500"
    nodes = nodes if way.nodes > 1 else ""
    return f"torchrun{nodes} --nproc-per-node {way.processes} -m calib {job}"
