"""Comparisons that tests make, and that mutants must fail."""

import os

import torch
from paged import RUNTIME, build
from runtime import oracle

# Rounding one value: half a step of its significand. Triton's interpreter cuts bfloat16 off, which
# is a whole step.
STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def tolerance(dtype):
    """Largest relative error allowed to an output of this type.

    Softmax weights are rounded to float16 (2^-11) and the output to its own type: together 2^-10,
    less than 1e-3, for float16. For float32 Q and the weights are two float16 values each, 22 bits;
    what is left is fp32's error of logits up to 2^6, 2^-18, which exp makes relative, and again
    that of the running maximum which they are taken from.
    """
    if dtype == torch.float16:
        return 1e-3
    if dtype == torch.bfloat16:
        return STEP[dtype] * (2 if INTERPRETED else 1) + 2.0**-11
    return 2.0**-17


def head_errors(got, want):
    """Norm of the error over the norm of what is wanted, per head of [T, H, D]."""
    got, want = got.cpu().double().transpose(0, 1), want.transpose(0, 1)
    error, size = (got - want).flatten(1).norm(dim=1), want.flatten(1).norm(dim=1)
    return torch.where(size == 0, error, error / size)


def assert_attention(case, device="cpu", implementations=("kernel",), runtime=RUNTIME):
    """The implementations give what the oracle gives; returns the worst relative error of each."""
    batch = build(case, device, runtime)
    want = oracle.attention(batch)
    return [
        assert_output(batch.attend(name, runtime), want, name, case) for name in implementations
    ]


def assert_output(got, want, name, case):
    """One implementation's output [T, H, D] is the wanted one, within rounding."""
    assert (got.dtype, got.shape) == (case.dtype, want.shape), name
    assert torch.isfinite(got).all(), f"{name}: a slot of no one was read, or nothing was written"
    assert (got.cpu()[(want == 0).all(2)] == 0).all(), f"{name}: not 0 where there is nothing"
    worst = head_errors(got, want).max().item() if got.numel() else 0.0
    assert worst <= tolerance(case.dtype), f"{name}: relative error {worst:.1e}"
    return worst
