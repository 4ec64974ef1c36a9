"""Weights as each tool stores them, made by the formats' documentation, and what they stand for.

Written apart from the readers: codes are packed bit by bit.
"""

import numpy as np
import torch
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
