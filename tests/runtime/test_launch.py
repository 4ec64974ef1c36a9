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
KERNELS = ["decode_kernel", "reduce_kernel", "extend_kernel", "append_kv_kernel"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")


@pytest.fixture(scope="module")
def found():
    """What `absent_gpus.py` found, by the names of its functions."""
    command = [sys.executable, str(ROOT / "tests/support/absent_gpus.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_second_launch_is_the_first_and_one_of_other_alignment_has_a_kernel_of_its_own(found):
    assert {*found["twice"]} == {"plain-64", "float16-64"}
    for variant in found["twice"].values():
        calls = variant["launched"]
        first, second, third = (calls[4 * i : 4 * i + 4] for i in range(3))
        assert ([name for name, *_ in first], second) == (KERNELS, first)
        assert [arguments for *_, arguments in third] == [arguments for *_, arguments in first]
        # the first time, and what the third needs: reduce does not read the query
        assert variant["by triton"] == [*KERNELS, "decode_kernel", "extend_kernel"]
        differ = [before[1] != after[1] for before, after in zip(second, third, strict=True)]
        assert differ == [True, False, True, False]


def test_layers_that_need_other_kernels_are_told_apart():
    def told_apart(block_size=4, **others):
        one = torch.ones(1)
        shape = {"num_kv_heads": 1, "head_dim": 8, "k_scale": one, "v_scale": one}
        return KVBlocks.empty(1, block_size, **shape, **others).specialization

    assert told_apart() == told_apart(block_size=8)
    assert told_apart() != told_apart(block_size=3), "V has another alignment than K"
    for changes in ({"k_center": torch.zeros(1, 8)}, {"count": True}, {"dtype": torch.float16}):
        assert told_apart() != told_apart(**changes), changes


def test_every_gpu_is_current_where_its_query_is_and_has_kernels_of_its_own(found):
    calls = found["on_devices"]  # with tensors on the current GPU, on another, and on that when it is current
    for call, gpu in zip(calls, (0, 1, 1), strict=True):
        assert {name for name, *_ in call["seen"]} == {*KERNELS, "empty", "empty_like", "zeros_like"}
        assert {at for _, at, *_ in call["seen"]} == {gpu}
        assert {stream for _, _, stream, _ in (e for e in call["seen"] if len(e) == 4)} == {gpu}
    # only where it differs, and then back: three launchers twice, of which one in two ways; a refused call
    assert [call["entered"] for call in calls] == [[], [1] * 9, []]
    assert [call["after"] for call in calls] == [0, 0, 1]
    first, second, again = ({e[3] for e in call["seen"] if len(e) == 4} for call in calls)
    assert len(first) == len(second) == 6  # decode and reduce for extend in parts too
    assert not first & second
    assert again == second


def test_growing_batches_and_tables_compile_little(found):
    # for 1, up to 32 and more sequences: decode and reduce, and extend in parts
    counts = {name: each["compiled"] for name, each in found["growing"].items()}
    assert counts == dict(zip(KERNELS, (6, 6, 1, 1), strict=True))
    assert all(each["asked"] == each["compiled"] for each in found["growing"].values())
