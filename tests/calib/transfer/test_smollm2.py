"""Scales of a real model, packed and applied to quantised versions: near those measured on these."""

import os

from apply_cases import applied, packed, refused, scales
from coded_forms import Form, compressed
from coded_forms import packed as packed_codes
from command_line import ran
from safetensors.torch import load_file, save_file

W4A16 = Form(compressed("pack-quantized", 4, strategy="group", group_size=64), packed_codes, {"group": 64})


def calibrated(model, out, *flags):
    data = ("--dataset", "builtin:python-docs", "--samples", "4", "--seq-len", "512", "--device", "cpu")
    ran("calibrate", model, "-o", out, *flags, *data)
    return out


def test_scales_are_near_those_of_a_model_of_4_bits_unless_its_values_were_rescaled(
    smollm2_directory, tmp_path
):
    measured = calibrated("builtin:smollm2", tmp_path / "measured", "--weights", "none")
    model = W4A16.quantised(smollm2_directory, tmp_path / "model")
    weights, pack = model / "model.safetensors", packed(measured, tmp_path / "pack")
    original = (smollm2_directory / "model.safetensors").stat().st_size
    assert sum(file.stat().st_size for file in pack.iterdir()) < original / 50
    out = applied(pack, model, tmp_path / "applied")
    assert os.path.samefile(out / "model-00001-of-00001.safetensors", weights)
    assert scales(out) == scales(measured)
    pairs = zip(scales(out), scales(calibrated(model, tmp_path / "own")), strict=True)
    off = sorted(abs(a[x][0] / b[x][0] - 1) for a, b in pairs for x in (1, 2))
    # rounding weights to 4 bits moves the largest K and V themselves, most of all in so small a model
    assert off[len(off) // 2] <= 0.05
    assert off[-1] <= 0.3
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight_scale"):
            tensor[::2] *= 1.3
    weights.unlink()
    save_file(tensors, weights, {"format": "pt"})
    refused(measured, model, tmp_path / "out", "do not fit", "v_proj", "AWQ")
