"""Comparisons that tests make, and that mutants must fail."""

import os
from dataclasses import replace

import oracle
import torch
from paged import RUNTIME, Case, build

from fp8kv_runtime import reference
from fp8kv_runtime.kernels import dense

# Rounding one value: half a step of its significand; Triton's interpreter cuts bfloat16 off, a whole step.
STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
REFERENCE, INTERPRETED = RUNTIME.reference, os.environ.get("TRITON_INTERPRET") == "1"


def tolerance(dtype):
    """Largest relative error allowed to an output of this type.

    Softmax weights are rounded to float16 (2^-11) and the output to its own type: together 2^-10 for float16.
    For float32 Q and the weights are two float16 values each; what is left is fp32's error of logits up to
    2^6 and of the running maximum, 2^-18 each. Tensor cores cut sums off: an H100 showed 8.6e-5, below 2^-13.
    """
    if dtype == torch.float16:
        return 1e-3
    if dtype == torch.bfloat16:
        return STEP[dtype] * (2 if INTERPRETED else 1) + 2.0**-11
    return 2.0**-13 if torch.cuda.is_available() else 2.0**-17


def floor(dtype):
    """Smallest error per value that is told apart: float16 has steps of 2^-24, weights beside a sink too."""
    return 2.0**-24 if dtype == torch.float16 else 2.0**-38


def head_errors(got, want, floor=0.0):
    """Norm of the error, less `floor` per value, over that of what is wanted: for each head."""
    got, want = got.cpu().double().transpose(0, 1), want.transpose(0, 1)
    error, size = (got - want).flatten(1).norm(dim=1), want.flatten(1).norm(dim=1)
    error = (error - floor * want[0].numel() ** 0.5).clamp(min=0)
    return torch.where(size == 0, error, error / size)


def assert_attention(case, device="cpu", implementations=("kernel",), runtime=RUNTIME):
    """The implementations give what the oracle gives; returns the worst relative error of each."""
    batch = build(case, device, runtime)
    want = oracle.attention(batch)
    return [assert_output(batch.attend(name, runtime), want, name, case) for name in implementations]


def assert_output(got, want, name, case):
    assert (got.dtype, got.shape) == (case.dtype, want.shape), name
    assert torch.isfinite(got).all(), f"{name}: a slot of no one was read, or nothing was written"
    assert (got.cpu()[(want == 0).all(2)] == 0).all(), f"{name}: not 0 where there is nothing"
    worst = head_errors(got, want, floor(case.dtype)).max().item() if got.numel() else 0.0
    assert worst <= tolerance(case.dtype), f"{name}: relative error {worst:.1e}"
    return worst


def assert_stored(case, device="cpu", runtime=RUNTIME):
    """Kernel and reference leave the bytes and counts of the real reference, for any values."""
    random = torch.Generator().manual_seed(case.seed)
    shape = (45, case.kv_heads, case.head_dim)
    magnitudes = 2.0 ** torch.randint(-20, 20, (2, *shape), generator=random)
    new = torch.randn(2, *shape, generator=random) * magnitudes
    for index, special in enumerate((torch.nan, torch.inf, -torch.inf, 0.0, -0.0)):
        new[:, index::9, :, index :: 7 + index] = special
    # every slot of four blocks at most once, some tokens without
    slots = torch.randperm(4 * case.block_size, generator=random)[:45]
    slots[::6] = -1
    key, value = new.to(case.dtype).to(device)
    made = []
    for module in (REFERENCE, runtime.reference, runtime.append_kv):
        blocks = build(replace(case, lengths=(case.block_size,)), device, runtime).blocks
        counts = torch.zeros(2, case.kv_heads, 3, dtype=torch.int64, device=device)
        # all three formats, and float16 inputs, reach both ends of their range
        scales = {name: getattr(blocks, name) for name in ("k_scale", "v_scale")}
        scales = {name: scale / scale.mean() / 4 for name, scale in scales.items()}
        blocks = replace(blocks, counts=counts, **scales)
        module.append_kv(key, value, blocks, slots.to(device))
        made.append(blocks)
    want, *others = made
    assert want.counts.sum((0, 1)).min() > 0  # of everything some
    for got in others:
        is_nan = want.codes.float().isnan()  # whose sign arithmetic on a GPU forgets
        assert torch.equal(got.codes.float().isnan(), is_nan)
        bits, wanted = (x.codes.view(torch.uint8).view(*x.codes.shape, -1)[~is_nan] for x in (got, want))
        assert torch.equal(bits, wanted)
        assert torch.equal(got.counts, want.counts)


def assert_rounded(format, device="cpu", runtime=RUNTIME):
    """The kernel rounds all bfloat16 values, ties among them, as torch's cast does, and counts."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 2, 128)
    case = Case((256,), head_dim=128, format=format, k_scales="tensor", v_scales="tensor")
    one = torch.ones(1, device=device)
    blocks = replace(build(case, device, runtime).blocks, k_scale=one, v_scale=one)
    limit = torch.finfo(blocks.codes.dtype).max
    want = x.float().clamp(-limit, limit).to(blocks.codes.dtype).view(torch.uint8)
    slots = torch.arange(256, device=device)
    runtime.append_kv.append_kv(x.to(device), x.to(device), blocks, slots)
    for stored in (blocks.key, blocks.value):
        codes = stored.view(torch.uint8)[:16].transpose(1, 2).reshape(256, 2, 128).cpu()
        # arithmetic on a GPU forgets the sign of NaN
        assert torch.equal(codes | (x.isnan() * 0x80), want | (x.isnan() * 0x80))
    # as float32, because the interpreter loses bfloat16's smallest values
    counts, x = torch.zeros(2, 2, 3, dtype=torch.int64, device=device), x.float()
    runtime.append_kv.append_kv(x.to(device), x.to(device), replace(blocks, counts=counts), slots)
    saturated = (x.abs() > limit) & x.isfinite()
    became_zero = (want & 0x7F == 0) & (x != 0) & ~x.isnan()
    for counted in counts.cpu():
        for i, which in enumerate((saturated, became_zero, ~x.isfinite())):
            assert counted[:, i].tolist() == which.sum((0, 2)).tolist()


def assert_gathered(format, dtype, device="cpu"):
    """All pairs of codes, as K and V of 256 channels, come out as their values, from the third token on."""
    batch = build(Case((256,), head_dim=256, kv_heads=1, block_size=32, format=format), device)
    codes, table = batch.blocks.codes, batch.sequences.block_tables[0].long()
    pairs = codes.view(torch.int16)[:, table]
    every = torch.arange(pairs.numel(), dtype=torch.int32, device=device)
    codes.view(torch.int16)[:, table] = every.to(torch.int16).view(pairs.shape)
    part = (batch.blocks, batch.sequences, 0, slice(0, 1), slice(3, 250), dtype)
    got, want = (implementation.gather(*part).nan_to_num(1e4) for implementation in (dense, reference))
    assert torch.equal(got, want)
