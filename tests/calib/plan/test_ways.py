"""Which ways fit, and in which order; figures worked out by hand."""

from dataclasses import dataclass

import pytest

from calib.errors import InputError
from calib.plan.ways import Gpu, Machines, Workload, find_gpu, ways

WHOLE, SPREAD, LAYERS = (
    "whole model per GPU",
    "one model over a node's GPUs",
    "layer by layer per GPU",
)


@dataclass
class Shape:
    """100 bytes of weights in 10 layers, one operation per token."""

    weight_bytes: int = 100
    layer_bytes: int = 10
    hidden_bytes: int = 2

    def flops(self, samples, seq_len):
        return samples * seq_len

    def activation_bytes(self, rows, columns):
        return rows


def plan(memory, *, gpus=4, nodes=1, samples=8):
    machines = Machines(Gpu(memory, 10.0), gpus, nodes, disk=20.0, efficiency=0.5)
    return ways(Shape(), Workload(samples, 5, 1), machines)


def by_name(found):
    return {way.name: way for way in found}


def test_what_fits_depends_on_the_memory_of_a_gpu():
    fitting = {memory: {w.name for w in plan(memory) if w.fits} for memory in (200, 50, 30, 10)}
    assert fitting == {200: {WHOLE, SPREAD, LAYERS}, 50: {SPREAD, LAYERS}, 30: {LAYERS}, 10: set()}


def test_what_fits_comes_first_and_the_fastest_of_it_before_the_others():
    # 40 tokens at 5 per second: 8 s on one GPU, 2 s on four; 100 bytes load in 5 s
    found = plan(50)
    assert [(way.name, way.seconds) for way in found] == [
        (SPREAD, 5 + 8),
        (LAYERS, 4 * 100 / 20),
        (WHOLE, 5 + 2),
    ]


def test_whole_batches_go_to_a_process():
    # 9 batches on 4 GPUs are 3 rounds of 5 tokens at 5 per second
    assert by_name(plan(200, samples=9))[WHOLE].seconds == 5 + 3


def test_layer_by_layer_every_process_reads_everything():
    way = by_name(plan(50, gpus=2, nodes=2))[LAYERS]
    assert (way.disk_read, way.hidden_bytes) == (2 * 100, 8 * 5 * 2 // 2)
    assert (way.nodes, way.processes, way.gpu_bytes) == (2, 2, 21)


def test_an_unknown_gpu_is_refused_with_those_known():
    with pytest.raises(InputError, match=r"--gpu v100 .* use one of .*h100, h200"):
        find_gpu("v100")
