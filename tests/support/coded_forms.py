"""Models in each form of quantised weights, as each tool stores them, by the formats' documentation.

Written apart from the readers: codes are packed bit by bit.
"""

import json
import re
import shutil
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from families import edit_json
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

FP8 = torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word holds output channel AWQ_ORDER[i]


def words(codes, bits, per_word=None):
    """Codes [rows, n] to int32 [rows, words]; `per_word` leaves the other bits of a word over."""
    rows, count = codes.shape
    per = per_word or count
    parts = np.pad(codes.numpy(), ((0, 0), (0, -count % per))).reshape(rows, -1, per, 1)
    ones = (parts >> np.arange(bits) & 1).astype("u1").reshape(*parts.shape[:2], -1)
    ones = np.pad(ones, ((0, 0), (0, 0), (0, -ones.shape[2] % 32)))
    packed = np.packbits(ones, axis=2, bitorder="little").view("<i4")
    return torch.from_numpy(packed.reshape(rows, -1))


def integers(weight, bits, group, *, symmetric=False, order=None):
    """Codes [o, i] from 0, zero points and float16 scales [o, groups], and their values [o, i]."""
    columns = weight.shape[1]
    index = torch.arange(columns) // group if order is None else order
    top, count = (1 << bits) - 1, columns // group
    lowest = torch.stack([weight[:, index == g].amin(1) for g in range(count)], 1).clamp(max=0)
    highest = torch.stack([weight[:, index == g].amax(1) for g in range(count)], 1).clamp(min=0)
    # a float16 ends at 6e-8, which no group of these reaches
    scale = ((highest - lowest) / top).half()
    zero = (-lowest / scale).round().clamp(1, top).int()
    if symmetric:
        scale = (2 * torch.maximum(highest, -lowest) / top).half()
        zero = torch.full_like(zero, 1 << (bits - 1))
    codes = (weight / scale[:, index] + zero[:, index]).round().clamp(0, top).int()
    return codes, zero, scale, (codes - zero[:, index]).float() * scale[:, index].float()


def gptq(module, weight, *, bits=4, group=32, version=1, ordered=False):
    """Packed down the columns, zero points of the first version less one."""
    order = None
    if ordered:
        shuffled = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
        order = torch.empty_like(shuffled)
        order[shuffled] = torch.arange(len(order)) // group
    codes, zero, scale, value = integers(weight, bits, group, order=order)
    index = torch.arange(weight.shape[1]) // group if order is None else order
    return {
        f"{module}.qweight": words(codes, bits).t().contiguous(),
        f"{module}.qzeros": words(zero.t() - int(version == 1), bits),
        f"{module}.scales": scale.t().contiguous(),
        f"{module}.g_idx": index.int(),
    }, value


def awq(module, weight, *, group=32):
    codes, zero, scale, value = integers(weight, 4, group)
    shuffle = (torch.arange(weight.shape[0]).view(-1, 8)[:, AWQ_ORDER]).flatten()
    return {
        f"{module}.qweight": words(codes.t()[:, shuffle], 4),
        f"{module}.qzeros": words(zero.t()[:, shuffle], 4),
        f"{module}.scales": scale.t().contiguous(),
    }, value


def packed(module, weight, *, bits=4, group=32, symmetric=True, ordered=False, per_word=None):
    """compressed-tensors' pack-quantized; `per_word` as 0.17 writes 3 bits."""
    order = torch.arange(weight.shape[1]).flip(0) // group if ordered else None
    codes, zero, scale, value = integers(
        weight, bits, group or weight.shape[1], symmetric=symmetric, order=order
    )
    tensors = {
        f"{module}.weight_packed": words(codes, bits, per_word),
        f"{module}.weight_scale": scale,
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors[f"{module}.weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    if ordered:
        tensors[f"{module}.weight_g_idx"] = order.int()
    return tensors, value


def blocked(weight, high, wide, largest):
    """The largest magnitude of each block over `largest`, and the same for every value."""
    rows, columns = weight.shape
    tiles = pad(weight.abs(), (0, -columns % wide, 0, -rows % high))
    tiles = tiles.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    scale = tiles.amax((1, 3)) / largest
    return scale, scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]


def fp8(module, weight, *, high=None, wide=None, name="weight_scale", shape=None, extra=()):
    scale, full = blocked(weight, high or weight.shape[0], wide or weight.shape[1], 448)
    codes = (weight / full).to(FP8)
    tensors = {f"{module}.weight": codes, f"{module}.{name}": scale}
    if shape is not None:
        tensors[f"{module}.{name}"] = scale.reshape(shape)
    tensors |= {f"{module}.{part}": torch.tensor([0.25]) for part in extra}
    return tensors, codes.float() * full


def mxfp8(module, weight):
    exponent = torch.floor(torch.log2(blocked(weight, 1, 32, 448)[0])) + 1
    full = exponent.exp2().repeat_interleave(32, 1)
    codes = (weight / full).to(FP8)
    tensors = {f"{module}.weight": codes, f"{module}.weight_scale": (exponent + 127).byte()}
    return tensors, codes.float() * full


def int8(module, weight, *, symmetric=True):
    codes, zero, scale, value = integers(weight, 8, weight.shape[1], symmetric=symmetric)
    tensors = {
        f"{module}.weight": (codes - 128).to(torch.int8),
        f"{module}.weight_scale": scale.float(),
    }
    if not symmetric:
        tensors[f"{module}.weight_zero_point"] = (zero - 128).to(torch.int8)
    return tensors, value


def fp4_codes(scaled):
    """Values of about -6 to 6 to codes 0 to 15, and what these stand for."""
    nearest = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    return nearest + 8 * (scaled < 0), E2M1[nearest] * torch.where(scaled < 0, -1.0, 1.0)


def pairs(codes):
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).byte()


def nvfp4(module, weight, *, form="compressed-tensors"):
    top = blocked(weight, 1, 16, 6)[0]
    second = 448 / top.max() if form == "compressed-tensors" else top.max() / 448
    scale = (top * second if form == "compressed-tensors" else top / second).to(FP8)
    small = scale.float() / second if form == "compressed-tensors" else scale.float() * second
    full = small.repeat_interleave(16, 1)
    codes, value = fp4_codes(weight / full)
    names = ("weight_packed", "weight_global_scale")
    names = names if form == "compressed-tensors" else ("weight", "weight_scale_2")
    return {
        f"{module}.{names[0]}": pairs(codes),
        f"{module}.weight_scale": scale,
        f"{module}.{names[1]}": second.reshape([1] if "global" in names[1] else []),
    }, value * full


def mxfp4(module, weight, *, name="weight_packed"):
    exponent = torch.floor(torch.log2(blocked(weight, 1, 32, 6)[0])) + 1
    full = exponent.exp2().repeat_interleave(32, 1)
    codes, value = fp4_codes(weight / full)
    scales = (exponent + 127).byte()
    return {f"{module}.{name}": pairs(codes), f"{module}.weight_scale": scales}, value * full


def gpt_oss(name, weight):
    """Fused experts [E, in, out] in blocks of 32 input channels."""
    experts, columns, rows = weight.shape
    flat = weight.transpose(1, 2).reshape(-1, columns)
    tensors, value = mxfp4("x", flat)
    blocks = tensors["x.weight_packed"].view(experts, rows, columns // 32, 16)
    scales = tensors["x.weight_scale"].view(experts, rows, columns // 32)
    value = value.view(experts, rows, columns).transpose(1, 2)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, value


@dataclass(frozen=True)
class Form:
    """One weight format: its quantization_config, and what makes tensors and values of a weight."""

    says: dict[str, Any]
    make: Any
    options: dict[str, Any] = field(default_factory=dict)
    file: str = "config.json"  # where the config is
    weights: str = r"(?:_proj|experts\.\d+\.w\d)\.weight$"  # a pattern of their names

    def quantised(self, model, directory):
        """A copy of the model in this form."""
        shutil.copytree(model, directory)
        return self.quantise(directory)

    def quantise(self, directory, plain=None):
        """Quantise the model in `directory`, and keep what its weights stand for in `plain`."""
        if plain:
            shutil.copytree(directory, plain)
        coded, values = {}, {}
        for name, tensor in load_file(directory / "model.safetensors").items():
            values[name] = tensor
            if not re.search(self.weights, name):
                coded[name] = tensor
                continue
            module = name.removesuffix(".weight")
            tensors, values[name] = self.make(module, tensor.float(), **self.options)
            coded |= tensors
        save_file(coded, directory / "model.safetensors", {"format": "pt"})
        if plain:
            kept = {name: value.contiguous() for name, value in values.items()}
            save_file(kept, plain / "model.safetensors", {"format": "pt"})
        if self.file == "config.json":
            edit_json(directory / "config.json", quantization_config=self.says)
        else:
            (directory / self.file).write_text(json.dumps(self.says))
        return directory


def compressed(form, bits, kind="int", **weights):
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def gptq_says(bits=4, **more):
    says = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, "sym": False}
    return {**says, **more}


def quark_says(**weight):
    return {
        "quant_method": "quark",
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
        "global_quant_config": {"weight": {"is_dynamic": False, **weight}},
        "layer_quant_config": {},
        "exclude": ["lm_head"],
    }


GPT_OSS = Form({"quant_method": "mxfp4"}, gpt_oss, weights=r"experts\.\w+_proj$")
PER_TENSOR = {"shape": [], "extra": ["input_scale"]}
GROUP = {"strategy": "group", "group_size": 32}
FORMS = {
    "gptq-2": Form(gptq_says(2), gptq, {"bits": 2}),
    "gptq-3": Form(gptq_says(3), gptq, {"bits": 3}),
    "gptq-4": Form(gptq_says(), gptq),
    "gptq-4-ordered": Form(gptq_says(desc_act=True), gptq, {"ordered": True}),
    "gptq-8": Form(gptq_says(8), gptq, {"bits": 8}),
    "gptq-v2": Form(gptq_says(checkpoint_format="gptq_v2"), gptq, {"version": 2}),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "compressed-fp8": Form(
        compressed("float-quantized", 8, "float", strategy="tensor"),
        fp8,
        {"shape": [1], "extra": ["input_scale"]},
    ),
    "compressed-fp8-channel": Form(
        compressed("float-quantized", 8, "float", strategy="channel"), fp8, {"high": 1}
    ),
    "compressed-fp8-block": Form(
        compressed("float-quantized", 8, "float", strategy="block", block_structure=[40, 48]),
        fp8,
        {"high": 40, "wide": 48},
    ),
    "compressed-int8": Form(compressed("int-quantized", 8, strategy="channel"), int8),
    "compressed-int8-asymmetric": Form(
        compressed("int-quantized", 8, strategy="channel", symmetric=False),
        int8,
        {"symmetric": False},
    ),
    "compressed-w4": Form(compressed("pack-quantized", 4, **GROUP), packed),
    "compressed-w4-asymmetric": Form(
        compressed("pack-quantized", 4, symmetric=False, **GROUP), packed, {"symmetric": False}
    ),
    "compressed-w4-ordered": Form(
        compressed("pack-quantized", 4, actorder="group", **GROUP), packed, {"ordered": True}
    ),
    "compressed-w3": Form(compressed("pack-quantized", 3, **GROUP), packed, {"bits": 3}),
    "compressed-w3-of-0.17": Form(
        compressed("pack-quantized", 3, **GROUP), packed, {"bits": 3, "per_word": 10}
    ),
    "compressed-w8-channel": Form(
        compressed("pack-quantized", 8, strategy="channel"), packed, {"bits": 8, "group": None}
    ),
    "compressed-nvfp4": Form(
        compressed("nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group_size=16),
        nvfp4,
    ),
    "compressed-mxfp4": Form(compressed("mxfp4-pack-quantized", 4, "float", **GROUP), mxfp4),
    "compressed-mxfp8": Form(compressed("mxfp8-quantized", 8, "float", **GROUP), mxfp8),
    "modelopt-fp8": Form({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8, PER_TENSOR),
    "modelopt-nvfp4": Form(
        {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}},
        nvfp4,
        {"form": "modelopt"},
        "hf_quant_config.json",
    ),
    "fp8-block": Form(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [40, 48]},
        fp8,
        {"high": 40, "wide": 48, "name": "weight_scale_inv"},
    ),
    "fp8-tensor": Form({"quant_method": "fp8", "activation_scheme": "static"}, fp8, PER_TENSOR),
    "quark-fp8": Form(quark_says(dtype="fp8_e4m3", qscheme="per_tensor"), fp8, PER_TENSOR),
    "quark-mxfp4": Form(
        quark_says(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"),
        mxfp4,
        {"name": "weight"},
    ),
}
