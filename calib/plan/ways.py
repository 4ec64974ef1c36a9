"""The ways a model can be calibrated on given machines, each with its memory, reading and time."""

from dataclasses import asdict, dataclass
from typing import Any

from calib.errors import InputError
from calib.plan.shape import ModelShape

# of a GPU's memory and of a machine's; the rest is for the driver, statistics and the system
_SHARE = 0.9


@dataclass(frozen=True)
class Gpu:
    """One GPU, as its vendor describes it."""

    memory: int  # bytes
    flops: float  # dense bfloat16, per second


# gigabytes and teraflops of data sheets; figures there "with sparsity" are halved
GPUS = {
    "a100-40": (40, 312),
    "a100": (80, 312),
    "l4": (24, 121),
    "l40s": (48, 362),
    "rtx4090": (24, 165),
    "h100": (80, 989),
    "h200": (141, 989),
    "b200": (180, 2250),
    "mi300x": (192, 1307),
    "mi325x": (256, 1307),
    "mi355x": (288, 2500),
}


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`; an InputError if it is not in the table."""
    if name.lower() not in GPUS:
        raise InputError(f"--gpu {name} is not one this plans for; use one of {', '.join(GPUS)}")
    gigabytes, teraflops = GPUS[name.lower()]
    return Gpu(gigabytes * 10**9, teraflops * 10**12)


@dataclass(frozen=True)
class Machines:
    """What there is to run on."""

    gpu: Gpu
    gpus: int  # per node
    nodes: int
    disk: float  # bytes per second that one node reads
    efficiency: float  # share of the GPU's data-sheet speed that a forward pass reaches


@dataclass(frozen=True)
class Workload:
    """What there is to read."""

    samples: int
    seq_len: int
    batch_size: int


@dataclass(frozen=True)
class Way:
    """One way to run it."""

    name: str
    offload: str  # of `fp8kv calibrate`
    nodes: int
    processes: int  # per node
    gpu_bytes: int  # each GPU's
    disk_read: int  # bytes, per node
    hidden_bytes: int  # of host memory or disk, per node, for what lies between two layers
    seconds: float
    fits: bool


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
        cached = self.shape.cached_values
        return {
            "model": self.model,
            "parameters": self.shape.parameters,
            "weight_bytes": self.shape.weight_bytes,
            "layers": len(self.shape.layers),
            "layer_bytes": self.shape.layer_bytes,
            "kv_bytes_per_token": {"16 bits": 2 * cached, "fp8": cached},
            "flops": self.shape.flops(self.work.samples, self.work.seq_len),
            "workload": asdict(self.work),
            "machines": asdict(self.machines),
            "ways": [asdict(way) for way in self.ways],
        }


def ways(shape: ModelShape, work: Workload, machines: Machines) -> list[Way]:
    """Every way, the fastest that fits first, those that do not fit last."""
    nodes, gpus, weights = machines.nodes, machines.gpus, shape.weight_bytes
    activations = shape.activation_bytes(work.batch_size, work.seq_len)
    # the first process of a node reads the disk, the others what the system keeps of it
    load = weights / machines.disk
    alone, together = (_compute(shape, work, machines, n) for n in (1, nodes * gpus))
    # whole layers lie on a GPU, so the fullest has up to one more than its share
    spread = min(weights // gpus + shape.layer_bytes, weights) + activations
    layer_by_layer = 2 * shape.layer_bytes + activations
    hidden = work.samples * work.seq_len * shape.hidden_bytes // nodes
    whole = weights + activations

    def fits(size: int) -> bool:
        return size <= _SHARE * machines.gpu.memory

    found = [
        Way("whole model per GPU", "none", nodes, gpus, whole, weights, 0, load + together,
            fits(whole)),
        # a batch is on one GPU at a time
        Way("one model over a node's GPUs", "none", 1, 1, spread, weights, 0, load + alone,
            fits(spread)),
        # each process reads all the weights while it computes
        Way("layer by layer per GPU", "layerwise", nodes, gpus, layer_by_layer, gpus * weights,
            hidden, max(gpus * load, together), fits(layer_by_layer)),
    ]  # fmt: skip
    return sorted(found, key=lambda way: (not way.fits, way.seconds))


def _compute(shape: ModelShape, work: Workload, machines: Machines, gpus: int) -> float:
    batches = -(-work.samples // work.batch_size)
    # whole batches go to a process
    rounds = -(-batches // gpus)
    flops = shape.flops(min(rounds * work.batch_size, work.samples), work.seq_len)
    return flops / (machines.gpu.flops * machines.efficiency)
