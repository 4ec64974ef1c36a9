"""The ways a model can be calibrated on given machines, each with its memory, reading and time."""

from dataclasses import dataclass

from calib.plan.gpus import Gpu
from calib.plan.shape import ModelShape

# of a GPU's memory and of a machine's; the rest is for the driver, statistics and the system
_SHARE = 0.9


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


def ways(shape: ModelShape, work: Workload, machines: Machines) -> list[Way]:
    """Every way, the fastest that fits first, those that do not fit last."""
    found = [
        _whole_model_per_gpu(shape, work, machines),
        _one_model_over_the_gpus(shape, work, machines),
        _layer_by_layer(shape, work, machines),
    ]
    return sorted(found, key=lambda way: (not way.fits, way.seconds))


def _whole_model_per_gpu(shape: ModelShape, work: Workload, machines: Machines) -> Way:
    gpu_bytes = shape.weight_bytes + _activations(shape, work)
    # the first process of a node reads the disk, the others what the system keeps of it
    load = shape.weight_bytes / machines.disk
    return Way(
        "whole model per GPU",
        "none",
        machines.nodes,
        machines.gpus,
        gpu_bytes,
        shape.weight_bytes,
        0,
        load + _compute(shape, work, machines, machines.nodes * machines.gpus),
        gpu_bytes <= _SHARE * machines.gpu.memory,
    )


def _one_model_over_the_gpus(shape: ModelShape, work: Workload, machines: Machines) -> Way:
    # whole layers lie on a GPU, so the fullest has up to one more than its share
    share = shape.weight_bytes // machines.gpus + shape.layer_bytes
    gpu_bytes = min(share, shape.weight_bytes) + _activations(shape, work)
    # a batch is on one GPU at a time
    seconds = shape.weight_bytes / machines.disk + _compute(shape, work, machines, 1)
    return Way(
        "one model over a node's GPUs",
        "none",
        1,
        1,
        gpu_bytes,
        shape.weight_bytes,
        0,
        seconds,
        gpu_bytes <= _SHARE * machines.gpu.memory,
    )


def _layer_by_layer(shape: ModelShape, work: Workload, machines: Machines) -> Way:
    gpu_bytes = 2 * shape.layer_bytes + _activations(shape, work)
    # each process reads all the weights while it computes
    read = machines.gpus * shape.weight_bytes
    computing = _compute(shape, work, machines, machines.nodes * machines.gpus)
    hidden = work.samples * work.seq_len * shape.hidden_bytes
    return Way(
        "layer by layer per GPU",
        "layerwise",
        machines.nodes,
        machines.gpus,
        gpu_bytes,
        read,
        hidden // machines.nodes,
        max(read / machines.disk, computing),
        gpu_bytes <= _SHARE * machines.gpu.memory,
    )


def _activations(shape: ModelShape, work: Workload) -> int:
    return shape.activation_bytes(work.batch_size, work.seq_len)


def _compute(shape: ModelShape, work: Workload, machines: Machines, gpus: int) -> float:
    batches = -(-work.samples // work.batch_size)
    # whole batches go to a process
    rounds = -(-batches // gpus)
    flops = shape.flops(min(rounds * work.batch_size, work.samples), work.seq_len)
    return flops / (machines.gpu.flops * machines.efficiency)
