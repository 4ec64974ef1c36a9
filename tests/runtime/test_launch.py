"""A second launch does not go through Triton; the driver gets what Triton would give it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8kv_runtime.storage import KVBlocks

ROOT = Path(__file__).parents[2]
VARIANTS = ("plain-64", "channels-128", "float16-64")
KERNELS = ["decode_kernel", "reduce_kernel", "extend_kernel", "append_kv_kernel"]

# what Triton compiles apart
MADE = {
    "other alignment of V than of K": {"block_size": 3},
    "a centre": {"k_center": torch.zeros(1, 8)},
    "counters": {"count": True},
    "float16": {"dtype": torch.float16},
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")


@pytest.fixture(scope="module")
def launched():
    """By variant: what three calls launched, the third with a query that is not aligned."""
    return output_of("launch_twice.py", *VARIANTS)


@pytest.fixture(scope="module")
def launched_on_devices():
    """What happened with tensors on the current GPU, on another, and on that when it is current."""
    return output_of("launch_on_devices.py")


def output_of(name, *arguments):
    command = [sys.executable, str(ROOT / "tests" / "support" / name), *arguments]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_second_launch_is_the_first(variant, launched):
    calls = launched[variant]["launched"]
    first, second, third = (calls[4 * i : 4 * i + 4] for i in range(3))
    assert [name for name, *_ in first] == KERNELS
    assert second == first
    assert [arguments for *_, arguments in third] == [arguments for *_, arguments in first]
    # the first time, and what the third needs
    assert launched[variant]["by triton"] == [*KERNELS, "decode_kernel", "extend_kernel"]


@pytest.mark.parametrize("changes", MADE.values(), ids=MADE)
def test_layers_that_need_other_kernels_are_told_apart(changes):
    def told_apart(block_size=4, **others):
        one = torch.ones(1)
        shape = {"num_kv_heads": 1, "head_dim": 8, "k_scale": one, "v_scale": one}
        blocks = KVBlocks.empty(1, block_size, **shape, **others)
        return blocks.specialization

    assert told_apart() == told_apart(block_size=8)
    assert told_apart(**changes) != told_apart()


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_that_is_not_aligned_has_a_kernel_of_its_own(variant, launched):
    ids = [identity for _, identity, *_ in launched[variant]["launched"]]
    decode, reduce, extend, append = (ids[i::4] for i in range(4))
    assert decode[2] != decode[1]
    assert extend[2] != extend[1]
    assert reduce[2] == reduce[1]  # it does not read the query
    assert append[2] == append[1]


@pytest.mark.parametrize(("call", "gpu"), [(0, 0), (1, 1), (2, 1)])
def test_the_querys_gpu_is_current_at_allocations_and_launches(call, gpu, launched_on_devices):
    seen = launched_on_devices[call]["seen"]
    assert {name for name, *_ in seen} == {*KERNELS, "empty", "empty_like", "zeros_like"}
    assert {at for _, at, *_ in seen} == {gpu}
    assert {stream for _, _, stream, _ in (e for e in seen if len(e) == 4)} == {gpu}


def test_the_device_is_switched_only_where_it_differs_and_then_back(launched_on_devices):
    # three launchers twice, of which one in two ways, and a call that is refused
    assert [c["entered"] for c in launched_on_devices] == [[], [1] * 9, []]
    assert [c["after"] for c in launched_on_devices] == [0, 0, 1]


def test_two_gpus_share_no_compiled_kernel(launched_on_devices):
    first, second, again = ({e[3] for e in c["seen"] if len(e) == 4} for c in launched_on_devices)
    # decode and reduce for extend in parts too
    assert len(first) == len(second) == 6
    assert not first & second
    assert again == second


def test_growing_batches_and_tables_compile_little():
    # for 1, up to 32 and more sequences: decode, and extend in parts
    few, one = {"compiled": 6, "asked": 6}, {"compiled": 1, "asked": 1}
    assert output_of("launch_growing.py") == {
        "decode_kernel": few,
        "reduce_kernel": few,
        "extend_kernel": one,
        "append_kv_kernel": one,
    }
