"""Codes of a few bits to numbers."""

import torch
from torch import Tensor

# the magnitudes of FP4 E2M1; the upper half is negative
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack(words: Tensor, bits: int, count: int, *, across: bool = True) -> Tensor:
    """Take unsigned codes of `bits` out of int32 words [..., W]: int32 [..., count].

    Code i begins at bit i * bits, the lowest bit of the first word being 0. Codes that do not fill
    a word lie `across` words, or else leave its upper bits over.
    """
    mask = (1 << bits) - 1
    if 32 % bits == 0 or not across:
        shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
        return ((words.unsqueeze(-1) >> shifts) & mask).flatten(-2)[..., :count]
    first = torch.arange(count) * bits
    word, shift = first // 32, first % 32
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
    """E8M0 scales, uint8 or float8_e8m0fnu, as float32; 255 is NaN."""
    if exponents.dtype != torch.uint8:
        return exponents.float()
    return exponents.view(torch.float8_e8m0fnu).float()
