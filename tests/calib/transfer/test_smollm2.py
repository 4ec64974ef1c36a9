"""Scales of a real model, packed and applied to quantised versions: near those measured on these."""

import os

import pytest
from apply_cases import applied, packed, refused, scales
from coded_forms import FORMS, Form, compressed
from coded_forms import packed as packed_codes
from command_line import ran
from safetensors.torch import load_file, save_file

from calib.files.stored_scales import read_scales

W4A16 = Form(compressed("pack-quantized", 4, strategy="group", group_size=64), packed_codes, {"group": 64})
DATA = ("--dataset", "builtin:python-docs", "--samples", "4", "--seq-len", "512", "--device", "cpu")


def calibrated(model, out, *flags):
    ran("calibrate", model, "-o", out, *flags, *DATA)
    return out


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return calibrated("builtin:smollm2", tmp_path_factory.mktemp("measured") / "out", "--weights", "none")


def ratios(one, other):
    """Scales of `one` over those of `other`, K's and V's, one of each per layer."""
    pairs = zip(read_scales(one).layers, read_scales(other).layers, strict=True)
    return [[getattr(a, x)[0] / getattr(b, x)[0] for x in "kv"] for a, b in pairs]


def test_scales_are_near_those_of_a_model_of_4_bits_unless_its_values_were_rescaled(
    smollm2_directory, measured, tmp_path
):
    model = W4A16.quantised(smollm2_directory, tmp_path / "model")
    out = applied(measured, model, tmp_path / "applied")
    shard = "model-00001-of-00001.safetensors"
    assert os.path.samefile(out / shard, model / "model.safetensors")
    own = calibrated(model, tmp_path / "own")
    off = sorted(abs(r - 1) for pair in ratios(out, own) for r in pair)
    # rounding weights to 4 bits moves the largest K and V themselves, most of all in so small a model
    assert off[len(off) // 2] <= 0.05
    assert off[-1] <= 0.3
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight_scale"):
            tensor[::2] *= 1.3
    file.unlink()
    save_file(tensors, file, {"format": "pt"})
    refused(measured, model, tmp_path / "out", "do not fit", "v_proj", "AWQ")


def test_a_pack_is_small_and_of_the_very_scales_also_beside_fp8(smollm2_directory, measured, tmp_path):
    pack = packed(measured, tmp_path / "pack")
    weights = (smollm2_directory / "model.safetensors").stat().st_size
    assert sum(file.stat().st_size for file in pack.iterdir()) < weights / 50
    model = FORMS["compressed-fp8-channel"].quantised(smollm2_directory, tmp_path / "fp8")
    out = applied(pack, model, tmp_path / "applied")
    same = applied(pack, "builtin:smollm2", tmp_path / "same")
    assert scales(out) == scales(same) == scales(measured)
    own = calibrated(model, tmp_path / "own")
    off = sorted(abs(r - 1) for pair in ratios(out, own) for r in pair)
    assert off[len(off) // 2] <= 0.01
    assert off[-1] <= 0.05
