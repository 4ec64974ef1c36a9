"""Division by one scale as append does it on a GPU: its code, with a fused multiply-add."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fp8kv_runtime.kernels.append_kv import divide_by_one

N = 2**16
LIMIT = 2.0**17


@triton.jit
def divide_kernel(x_ptr, scale_ptr, out_ptr, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(out_ptr + at, divide_by_one(tl.load(x_ptr + at), tl.load(scale_ptr)))


def fused(self, x, y, z):
    """One rounding: a product of two float32 is exact in 64 bits, and their sum nearly always."""
    exact = x.data.astype(np.longdouble) * y.data + z.data
    return TensorHandle(exact.astype(np.float32), z.dtype.scalar)


@pytest.fixture
def divided(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(InterpreterBuilder, "create_fma", fused)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def divide(x, scale):
        out = torch.empty_like(x, device=device)
        divide_kernel[(1,)](x.to(device), torch.tensor([scale], device=device), out, N)
        return out.cpu()

    return divide


def values(dtype):
    random = torch.Generator().manual_seed(0)
    exponents = torch.randint(-20, 18, (N,), generator=random)
    return (torch.randn(N, generator=random) * 2.0**exponents).to(dtype).float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 0.0123, 3.7e-5, 1 / 448, 977.3, 2.0**-60, 1.3 * 2.0**59])
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_it_is_the_quotient_rounded_once(divided, dtype, scale):
    x, scale = values(dtype), float(np.float32(scale))
    if not 1e-9 < scale < 1e9:
        x = x * scale
    want = x / torch.tensor(scale)
    assert torch.equal(divided(x, scale), want.clamp(-LIMIT, LIMIT))


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_infinities_saturate_and_zeros_keep_their_sign(divided):
    x = torch.zeros(N)
    x[:7] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e38, -3e38])
    out = divided(x, 0.0123)
    assert out[:2].tolist() == [LIMIT, -LIMIT]
    assert out[2].isnan()
    assert out[3:5].signbit().tolist() == [False, True]
    assert out[5:7].tolist() == [LIMIT, -LIMIT]
