"""How Hopper's tensor cores add products of FP8 codes: about 14 bits, in steps of 32 products.

One WGMMA instruction adds 32 products to an accumulator. Significands, the accumulator's too, are shifted
to the largest exponent among them and cut off after 13 fraction bits, and so is their exact sum. Cuts are
towards zero: small terms beside a large sum are lost.

By the model of microsoft/MMA-Sim (arXiv 2511.10909), which its authors compared bit by bit with an H100;
DeepSeek-V3's report (arXiv 2412.19437, 3.3.2 and 3.5.2) describes the same. Nothing here ran beside one.
"""

import torch
from torch import Tensor

_STEP = 32  # products of one instruction
_FRACTION = 2.0**-13
_EXPONENT_BITS, _KEPT_BITS = 0x7F800000, -(1 << 10)  # of float32: all but the last 10 of 23 fraction bits
_SUBNORMAL = 2.0**-6  # smaller E4M3 codes have its exponent
_VALUES = 2**18  # products at a time, which stay in a processor's cache


def hopper_product(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """Return start + a @ b, float32 [..., rows, columns] with 13 fraction bits, as an H100 adds it.

    `a` [..., rows, n] and `b` [..., n, columns] are float32 values of E4M3 codes without their scale; n is
    walked in order.
    """
    total = a.new_zeros(*a.shape[:-1], b.shape[-1]) if start is None else start
    rows = max(1, _VALUES // (_STEP * b[..., 0, :].numel()))
    parts = zip(torch.split(a, rows, -2), torch.split(total, rows, -2), strict=True)
    return torch.cat([_add_rows(part, b, begin) for part, begin in parts], -2)


def _add_rows(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    for k in range(0, a.shape[-1], _STEP):
        # [..., rows, 32, 1] and [..., 1, 32, columns]
        x, y = a[..., k : k + _STEP, None], b[..., None, k : k + _STEP, :]
        largest = (_code_power(x) * _code_power(y)).amax(-2)
        step = largest.maximum(_power(total)).mul_(_FRACTION).clamp_(min=2.0**-100)
        products = (x * y).div_(step[..., None, :]).trunc_().sum(-2)
        total = _cut(products.add_((total / step).trunc_()).mul_(step))
    return total


def _power(x: Tensor) -> Tensor:
    """Return the largest power of two up to |x|; 0 for 0."""
    return (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def _code_power(codes: Tensor) -> Tensor:
    return _power(codes.contiguous()).clamp(min=_SUBNORMAL).where(codes != 0, 0.0)


def _cut(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & _KEPT_BITS).view(torch.float32)
