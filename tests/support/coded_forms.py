"""Models in each form of quantised weights, as each tool stores them; codes are packed bit by bit."""

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

FP8, E2M1 = torch.float8_e4m3fn, torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word holds output channel AWQ_ORDER[i]


def _named(module, tensors):
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def words(codes, bits, per_word=None):
    """Codes [rows, n] to int32 [rows, words]; `per_word` leaves the other bits of a word over."""
    rows, count = codes.shape
    per = per_word or count
    parts = np.pad(codes.numpy(), ((0, 0), (0, -count % per))).reshape(rows, -1, per, 1)
    ones = (parts >> np.arange(bits) & 1).astype("u1").reshape(*parts.shape[:2], -1)
    ones = np.pad(ones, ((0, 0), (0, 0), (0, -ones.shape[2] % 32)))
    return torch.from_numpy(np.packbits(ones, axis=2, bitorder="little").view("<i4").reshape(rows, -1))


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


def gptq(module, weight, *, group=32, version=1, ordered=False):
    """Packed down the columns, zero points of the first version less one."""
    index = torch.arange(weight.shape[1]) // group
    if ordered:
        shuffled = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
        index = torch.empty_like(shuffled).scatter(0, shuffled, index)
    codes, zero, scale, value = integers(weight, 4, group, order=index)
    tensors = {"qweight": words(codes, 4).t().contiguous(), "qzeros": words(zero.t() - int(version == 1), 4)}
    return _named(module, tensors | {"scales": scale.t().contiguous(), "g_idx": index.int()}), value


def awq(module, weight, *, group=32):
    codes, zero, scale, value = integers(weight, 4, group)
    shuffle = (torch.arange(weight.shape[0]).view(-1, 8)[:, AWQ_ORDER]).flatten()
    qweight, qzeros = (words(x.t()[:, shuffle], 4) for x in (codes, zero))
    return _named(module, {"qweight": qweight, "qzeros": qzeros, "scales": scale.t().contiguous()}), value


def packed(module, weight, *, bits=4, group=32, symmetric=True, ordered=False, per_word=None):
    """compressed-tensors' pack-quantized; `per_word` as 0.17 writes 3 bits."""
    order = torch.arange(weight.shape[1]).flip(0) // group if ordered else None
    group = group or weight.shape[1]
    codes, zero, scale, value = integers(weight, bits, group, symmetric=symmetric, order=order)
    tensors = {"weight_packed": words(codes, bits, per_word), "weight_scale": scale}
    tensors |= {"weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    if ordered:
        tensors["weight_g_idx"] = order.int()
    return _named(module, tensors), value


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
    scale = scale if shape is None else scale.reshape(shape)
    tensors = {f"{module}.weight": codes, f"{module}.{name}": scale}
    tensors |= {f"{module}.{part}": torch.tensor([0.25]) for part in extra}
    return tensors, codes.float() * full


def int8(module, weight, *, symmetric=True):
    codes, zero, scale, value = integers(weight, 8, weight.shape[1], symmetric=symmetric)
    tensors = {f"{module}.weight": (codes - 128).to(torch.int8), f"{module}.weight_scale": scale.float()}
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
    if form == "compressed-tensors":
        second = 448 / top.max()
        scale = (top * second).to(FP8)
        small, names, second = scale.float() / second, ("weight_packed", "weight_global_scale"), second[None]
    else:
        second = top.max() / 448
        scale = (top / second).to(FP8)
        small, names = scale.float() * second, ("weight", "weight_scale_2")
    full = small.repeat_interleave(16, 1)
    codes, value = fp4_codes(weight / full)
    return _named(module, {names[0]: pairs(codes), "weight_scale": scale, names[1]: second}), value * full


def mxfp4(module, weight, *, name="weight_packed"):
    exponent = torch.floor(torch.log2(blocked(weight, 1, 32, 6)[0])) + 1
    full = exponent.exp2().repeat_interleave(32, 1)
    codes, value = fp4_codes(weight / full)
    return {f"{module}.{name}": pairs(codes), f"{module}.weight_scale": (exponent + 127).byte()}, value * full


def gpt_oss(name, weight):
    experts, columns, rows = weight.shape
    tensors, value = mxfp4("x", weight.transpose(1, 2).reshape(-1, columns))
    blocks = tensors["x.weight_packed"].view(experts, rows, columns // 32, 16)
    scales = tensors["x.weight_scale"].view(experts, rows, columns // 32)
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return tensors, value.view(experts, rows, columns).transpose(1, 2)


@dataclass(frozen=True)
class Form:
    says: dict[str, Any]
    make: Any
    options: dict[str, Any] = field(default_factory=dict)
    file: str = "config.json"  # where the config is
    weights: str = r"(?:_proj|experts\.\d+\.w\d)\.weight$"  # a pattern of their names

    def quantised(self, model, directory):
        return self.quantise(shutil.copytree(model, directory))

    def quantise(self, directory, plain=None):
        if plain:
            shutil.copytree(directory, plain)
        coded, values = {}, {}
        for name, tensor in load_file(directory / "model.safetensors").items():
            tensors, values[name] = {name: tensor}, tensor
            if re.search(self.weights, name):
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
    says = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return says | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def _compressed(form, kind, bits, make, options, **weights):
    return Form(compressed(form, bits, kind, **weights), make, options)


def _gptq(options, **more):
    says = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    return Form(says | more, gptq, options)


def _quark(make, options, **weight):
    says = {"quant_method": "quark", "export": {"weight_format": "real_quantized", "pack_method": "reorder"}}
    says |= {"global_quant_config": {"weight": {"is_dynamic": False, **weight}}, "layer_quant_config": {}}
    return Form(says | {"exclude": ["lm_head"]}, make, options)


GPT_OSS = Form({"quant_method": "mxfp4"}, gpt_oss, weights=r"experts\.\w+_proj$")
PER_TENSOR, BLOCKS = {"shape": [], "extra": ["input_scale"]}, {"high": 40, "wide": 48}
GROUP = {"strategy": "group", "group_size": 32}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
_NVFP4 = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}}
_FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [40, 48]}
_FP8, _INT8 = ("float-quantized", "float", 8, fp8), ("int-quantized", "int", 8, int8)
_PACKED, _ASYMMETRIC = ("pack-quantized", "int"), {"symmetric": False}
_TENSOR_GROUP = {"strategy": "tensor_group", "group_size": 16}
_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
FORMS = {
    "gptq-4": _gptq({}),
    "gptq-4-ordered": _gptq({"ordered": True}, desc_act=True),
    "gptq-v2": _gptq({"version": 2}, checkpoint_format="gptq_v2"),
    "awq": Form(_AWQ, awq),
    "compressed-fp8": _compressed(*_FP8, PER_TENSOR | {"shape": [1]}, strategy="tensor"),
    "compressed-fp8-channel": _compressed(*_FP8, {"high": 1}, strategy="channel"),
    "compressed-fp8-block": _compressed(*_FP8, BLOCKS, strategy="block", block_structure=[40, 48]),
    "compressed-int8": _compressed(*_INT8, {}, strategy="channel"),
    "compressed-int8-asymmetric": _compressed(*_INT8, _ASYMMETRIC, strategy="channel", symmetric=False),
    "compressed-w4": _compressed(*_PACKED, 4, packed, {}, **GROUP),
    "compressed-w4-asymmetric": _compressed(*_PACKED, 4, packed, _ASYMMETRIC, symmetric=False, **GROUP),
    "compressed-w4-ordered": _compressed(*_PACKED, 4, packed, {"ordered": True}, actorder="group", **GROUP),
    "compressed-w3": _compressed(*_PACKED, 3, packed, {"bits": 3}, **GROUP),
    "compressed-w3-of-0.17": _compressed(*_PACKED, 3, packed, {"bits": 3, "per_word": 10}, **GROUP),
    "compressed-w8-channel": _compressed(*_PACKED, 8, packed, {"bits": 8, "group": None}, strategy="channel"),
    "compressed-nvfp4": _compressed("nvfp4-pack-quantized", "float", 4, nvfp4, {}, **_TENSOR_GROUP),
    "compressed-mxfp4": _compressed("mxfp4-pack-quantized", "float", 4, mxfp4, {}, **GROUP),
    "modelopt-fp8": Form({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8, PER_TENSOR),
    "modelopt-nvfp4": Form(_NVFP4, nvfp4, {"form": "modelopt"}, "hf_quant_config.json"),
    "fp8-block": Form(_FP8_BLOCK, fp8, BLOCKS | {"name": "weight_scale_inv"}),
    "fp8-tensor": Form({"quant_method": "fp8", "activation_scheme": "static"}, fp8, PER_TENSOR),
    "quark-fp8": _quark(fp8, PER_TENSOR, dtype="fp8_e4m3", qscheme="per_tensor"),
    "quark-mxfp4": _quark(mxfp4, {"name": "weight"}, **_MXFP4),
}
