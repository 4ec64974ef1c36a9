"""Codes of a few bits to numbers."""

import torch
from torch import Tensor

from calib.models.quantized.coded_weight import WeightFormatError

# the magnitudes of FP4 E2M1; the upper half is negative
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise(codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """`(code - zero) * scale` of `codes` [n, columns], float32 of the same shape.

    `scales` and `zeros` [n or 1, groups] are those of equal groups of columns, one after another.
    """
    codes = codes.reshape(len(codes), scales.shape[1], -1)
    codes = codes if zeros is None else codes - zeros.unsqueeze(2)
    return (codes * scales.unsqueeze(2)).flatten(1)


def order_of(group: Tensor | None, columns: int, groups: int) -> Tensor | None:
    """The checked `group` of each of the columns; None: groups follow each other."""
    if group is None or torch.equal(group, torch.arange(columns).to(group) // (columns // groups)):
        return None
    if group.min() < 0 or group.max() >= groups:
        raise WeightFormatError(f"its g_idx names a group beyond the {groups} there are")
    return group.long()


def unpack(
    words: Tensor, bits: int, count: int, *, across: bool = True, first: Tensor | None = None
) -> Tensor:
    """Take unsigned codes of `bits` out of int32 words [..., W]: int32 [..., count].

    Code i begins at bit i * bits, the lowest bit of the first word being 0, or in each word at
    those that `first` holds. Codes that do not fill a word lie `across` words, or else leave its
    upper bits over.
    """
    mask = (1 << bits) - 1
    if 32 % bits == 0 or not across:
        shifts = torch.arange(32 // bits, dtype=torch.int32) * bits if first is None else first
        return ((words.unsqueeze(-1) >> shifts) & mask).flatten(-2)[..., :count]
    begin = torch.arange(count) * bits
    word, shift = begin // 32, begin % 32
    wide = words.long() & 0xFFFFFFFF
    after = wide[..., (word + 1).clamp(max=words.shape[-1] - 1)] << (32 - shift)
    return (((wide[..., word] >> shift) | after) & mask).int()


def unpack_down(words: Tensor, bits: int, count: int) -> Tensor:
    """Take unsigned codes out of the columns of int32 words [W, n]: int32 [count, n].

    A column holds its codes as a row does for `unpack`.
    """
    mask = (1 << bits) - 1
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        return ((words.unsqueeze(1) >> shifts[:, None]) & mask).flatten(0, 1)[:count]
    return unpack(words.t(), bits, count).t().contiguous()


def words_for(count: int, bits: int, *, across: bool = True) -> int:
    """How many int32 words hold `count` codes of `bits`."""
    return -(-count * bits // 32) if across else -(-count // (32 // bits))


def unpack_fp4(packed: Tensor) -> Tensor:
    """FP4 E2M1, two in a byte, the first in the lower half: uint8 [..., n] to float32 [..., 2n]."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[codes.int()]


def powers_of_two(exponents: Tensor) -> Tensor:
    """E8M0 scales, uint8 or float8_e8m0fnu, as float32; 255 is NaN. Floats stay what they are."""
    if exponents.dtype == torch.uint8:
        exponents = exponents.view(torch.float8_e8m0fnu)
    return exponents.float()
