"""Real models quantised by compressed-tensors' documentation, fast enough for a hundred million."""

import shutil

import torch
from coded_forms import compressed
from quantized_models import edit_json, edit_tensors

FP8 = torch.float8_e4m3fn


def fp8_channel(module, weight):
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {f"{module}.weight": (weight / scale).to(FP8), f"{module}.weight_scale": scale}


def w4a16(module, weight, group=64):
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // group, group)
    scale = groups.abs().amax(2) / 7.5
    codes = (groups / scale[..., None]).round().clamp(-8, 7).to(torch.int32) + 8
    shifts = 4 * torch.arange(8, dtype=torch.int32)
    # no bits overlap, so their sum is the word, whatever its sign
    words = (codes.view(rows, columns // 8, 8) << shifts).sum(2, dtype=torch.int32)
    return {
        f"{module}.weight_packed": words,
        f"{module}.weight_scale": scale.to(weight.dtype),
        f"{module}.weight_shape": torch.tensor([rows, columns]),
    }


QUANTISED = {
    "fp8": (fp8_channel, compressed("float-quantized", 8, "float", strategy="channel")),
    "w4a16": (
        w4a16,
        compressed("pack-quantized", 4, strategy="group", group_size=64),
    ),
}


def quantised(model, path, form):
    """A copy of the model whose linear weights have that form."""
    shutil.copytree(model, path)
    make, says = QUANTISED[form]
    edit_json(path / "config.json", quantization_config=says)
    return edit_tensors(path, make)
