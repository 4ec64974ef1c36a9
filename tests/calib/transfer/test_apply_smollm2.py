"""Scales of a real model, applied to quantised versions: near those measured on these."""

import os
import time

import pytest
from big_weights import quantised
from command_line import fp8kv, one_line_error
from safetensors.torch import load_file, save_file

from calib.files.stored_scales import read_scales

DATA = ("--dataset", "builtin:python-docs", "--samples", "4", "--seq-len", "512", "--device", "cpu")


@pytest.fixture(scope="module")
def measured(smollm2_directory, tmp_path_factory):
    out = tmp_path_factory.mktemp("measured") / "out"
    done = fp8kv("calibrate", smollm2_directory, "-o", out, "--weights", "none", *DATA)
    assert done.exit_code == 0, done.stderr
    return out


def ratios(one, other):
    """Scales of `one` over those of `other`, K's and V's, one of each per layer."""
    pairs = zip(read_scales(one).layers, read_scales(other).layers, strict=True)
    return [[getattr(a, x)[0] / getattr(b, x)[0] for x in "kv"] for a, b in pairs]


# rounding weights to 4 bits moves the largest K and V themselves, most of all in so small a model
@pytest.mark.parametrize(("form", "median", "most"), [("fp8", 0.01, 0.05), ("w4a16", 0.05, 0.3)])
def test_scales_are_near_those_of_the_quantised_model(
    form, median, most, smollm2_directory, measured, tmp_path
):
    model = quantised(smollm2_directory, tmp_path / form, form)
    began = time.perf_counter()
    done = fp8kv("apply", measured, model, "-o", tmp_path / "applied")
    seconds = time.perf_counter() - began
    assert done.exit_code == 0, done.stderr
    shard = "model-00001-of-00001.safetensors"
    assert os.path.samefile(tmp_path / "applied" / shard, model / "model.safetensors")
    done = fp8kv("calibrate", model, "-o", tmp_path / "own", *DATA)
    assert done.exit_code == 0, done.stderr
    off = sorted(abs(r - 1) for pair in ratios(tmp_path / "applied", tmp_path / "own") for r in pair)
    assert off[len(off) // 2] <= median
    assert off[-1] <= most
    assert seconds < 20


def test_rescaled_values_of_a_real_model_are_refused(smollm2_directory, measured, tmp_path):
    model = quantised(smollm2_directory, tmp_path / "model", "w4a16")
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight_scale"):
            tensor[::2] *= 1.3
    save_file(tensors, file, {"format": "pt"})
    done = fp8kv("apply", measured, model, "-o", tmp_path / "out")
    one_line_error(done, "do not fit", "v_proj", "AWQ")
