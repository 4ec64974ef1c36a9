"""Codes of a few bits in int32 words, and scales that are powers of two."""

import torch
from torch import Tensor


def unpack_words(
    words: Tensor,
    bits: int,
    codes: slice,
    *,
    dim: int = 1,
    is_spaced: bool = False,
    shifts: Tensor | None = None,
) -> Tensor:
    """Unpack unsigned `codes` along `dim` of the int32 matrix `words`, as int32.

    Code i begins at bit `i * bits`, counted from the lowest bit of the first word. A spaced word holds
    whole codes only and leaves its upper bits unused. `shifts` are the first bits of the codes in a
    word, where these have another order.
    """
    mask = (1 << bits) - 1
    if is_spaced or 32 % bits == 0:
        per_word = 32 // bits
        first = codes.start // per_word
        words = words.narrow(dim, first, -(-codes.stop // per_word) - first)
        shifts = torch.arange(per_word, dtype=torch.int32) * bits if shifts is None else shifts
        values = (words.unsqueeze(dim + 1) >> (shifts if dim else shifts[:, None])) & mask
        start = codes.start - first * per_word
        return values.flatten(dim, dim + 1).narrow(dim, start, codes.stop - codes.start)
    begin = torch.arange(codes.start, codes.stop) * bits
    word, shift = begin // 32, begin % 32 if dim else (begin % 32)[:, None]
    wide = words.long() & 0xFFFFFFFF
    following = (word + 1).clamp(max=words.shape[dim] - 1)
    upper = wide.index_select(dim, following) << (32 - shift)
    return (((wide.index_select(dim, word) >> shift) | upper) & mask).int()


def count_words(count: int, bits: int, *, is_spaced: bool = False) -> int:
    """Return the number of int32 words that hold `count` codes."""
    return -(-count // (32 // bits)) if is_spaced else -(-count * bits // 32)


def scales_to_float(scales: Tensor) -> Tensor:
    """Return scales as float32; uint8 holds powers of two (E8M0), of which 255 is NaN."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
