"""Calibrations in several processes, as torchrun starts them, and their statistics."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from calib.scales.stats_file import load_stats

ROOT = Path(__file__).parents[2]


def statistics(out):
    stats = load_stats(out)
    of_text = [*f"{stats.text.to_json()} {stats.text.sketch}".encode()]
    counts = {"counts": torch.tensor(stats.counts()), "text": torch.tensor(of_text)}
    return load_file(out / "fp8kv_stats.safetensors") | counts


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def launched(count, *arguments, **environment):
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", count)
    command = [sys.executable, "-m", *launcher, "-m", "calib", "calibrate", *arguments]
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, timeout=300,
    )  # fmt: skip
