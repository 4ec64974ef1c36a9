"""What a calibration needs, before anything is downloaded or rented."""

from dataclasses import asdict, dataclass
from typing import Any

from calib.plan.shape import ModelShape
from calib.plan.ways import Machines, Way, Workload, ways
from calib.sizes import show_size

HEADINGS = ("way", "processes", "each GPU", "read per node", "hidden states", "time")


@dataclass(frozen=True)
class Plan:
    """The ways to calibrate one model, the best first."""

    model: str
    shape: ModelShape
    work: Workload
    machines: Machines
    ways: list[Way]

    def to_json(self) -> dict[str, Any]:
        """Everything, in bytes, seconds and operations."""
        return {
            "model": self.model,
            "parameters": self.shape.parameters,
            "weight_bytes": self.shape.weight_bytes,
            "layers": len(self.shape.layers),
            "layer_bytes": self.shape.layer_bytes,
            "kv_bytes_per_token": {
                "16 bits": 2 * self.shape.cached_values,
                "fp8": self.shape.cached_values,
            },
            "flops": self.shape.flops(self.work.samples, self.work.seq_len),
            "workload": asdict(self.work),
            "machines": asdict(self.machines),
            "ways": [asdict(way) for way in self.ways],
        }


def make_plan(model: str, shape: ModelShape, work: Workload, machines: Machines) -> Plan:
    """Work out every way to run `work` on `machines`."""
    return Plan(model, shape, work, machines, ways(shape, work, machines))


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """The table's rows, by `HEADINGS`."""
    return [
        (
            way.name,
            f"{way.nodes} x {way.processes}",
            show_size(way.gpu_bytes),
            show_size(way.disk_read),
            show_size(way.hidden_bytes) if way.hidden_bytes else "-",
            show_time(way.seconds) if way.fits else "does not fit",
        )
        for way in plan.ways
    ]


def opening_lines(plan: Plan) -> list[str]:
    """What the model is and what one pass costs."""
    shape, work = plan.shape, plan.work
    tokens = work.samples * work.seq_len
    flops = shape.flops(work.samples, work.seq_len)
    return [
        f"{shape.parameters / 1e9:.2f} billion parameters, {show_size(shape.weight_bytes)} as "
        f"{str(shape.dtype).removeprefix('torch.')}; {len(shape.layers)} layers, the largest "
        f"{show_size(shape.layer_bytes)}",
        f"KV cache: {2 * shape.cached_values:,} bytes per token in 16 bits, "
        f"{shape.cached_values:,} in FP8",
        f"{work.samples} samples of {work.seq_len} tokens: {tokens:,} tokens, {flops:.3g} FLOPs",
    ]


def closing_lines(plan: Plan) -> list[str]:
    """What to type, and what was assumed."""
    machines, best = plan.machines, plan.ways[0]
    assumed = (
        f"Times assume {machines.efficiency:.0%} of the GPU's data-sheet speed and "
        f"{machines.disk / 1e9:g} GB/s of disk per node; they are estimates, nothing was run."
    )
    if not best.fits:
        return ["No way fits: give GPUs with more memory, or a smaller --batch-size.", assumed]
    return [command(plan.model, plan.work, best), assumed]


def command(model: str, work: Workload, way: Way) -> str:
    """The command that runs `work` in this way."""
    flags = f"--samples {work.samples} --seq-len {work.seq_len} --batch-size {work.batch_size}"
    model = "MODEL" if model.endswith(".json") else model
    job = f"calibrate {model} {flags} --offload {way.offload}"
    if way.nodes * way.processes == 1:
        return f"fp8kv {job}"
    nodes = f" --nnodes {way.nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500"
    nodes = nodes if way.nodes > 1 else ""
    return f"torchrun{nodes} --nproc-per-node {way.processes} -m cli {job}"


def show_time(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
