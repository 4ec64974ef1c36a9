"""vLLM's Triton attention kernel beside ours, in Triton's interpreter: the same numbers.

So `make bench-kernels` times the same work, two kernels written apart agree on FP8 blocks, on prompts and
on decode, and `--attention vllm_triton` and `vllm_triton_fp8` round as the kernel does.
"""

from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import interpreted_triton  # before Triton
import torch
from engine import report
from kernel_paged_peers import fp8_peers, paged_peers, per_tensor
from kernels.variants import CASES as TIMED
from torch import Tensor

from calib.bench.kernels import TOLERANCE, build, call, load_launchers, output_error, shrink
from calib.evaluate.engine_attention import vllm_triton_attention
from fp8kv_runtime.fp8 import dequantize, quantize
from fp8kv_runtime.options import AttentionOptions

PEERS = {"vLLM Triton": paged_peers, "vLLM Triton, FP8": fp8_peers}
_BLOCK, _SEGMENTS = 16, 16
# Sums in fp32 differ by 2^-20 or so between two orders. That moves a value to the next bfloat16
# where it lies so near the middle of two, 2^-8 apart: fewer than one in 500.
MOVED = 1 / 500
_SUMS = 2.0**-20


class Case(NamedTuple):
    tokens: int  # new ones
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64
    k_scale: float = 0.013
    v_scale: float = 0.031
    q_scale: float | None = None  # queries in FP8
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    fp8: torch.dtype = torch.float8_e4m3fn  # of queries, K and V

    @property
    def options(self) -> AttentionOptions:
        sinks = torch.linspace(-2, 4, self.num_heads) if self.has_sinks else None
        q_scale = None if self.q_scale is None else torch.tensor([self.q_scale])
        return AttentionOptions(softcap=self.softcap, sinks=sinks, q_scale=q_scale)


# no power of two among the scales: that would leave codes times scale exact in bfloat16
SIXTEEN_BITS = [
    Case(40, 70, 4, 2),
    Case(40, 70, 4, 4, 128, k_scale=1.7, v_scale=0.4),
    Case(33, 130, 6, 2, 80),
    Case(40, 170, 4, 1, window=50),
    Case(40, 70, 4, 2, softcap=5.0),
    Case(40, 70, 4, 2, has_sinks=True),
    Case(1, 300, 8, 1),
    Case(1, 700, 4, 2, has_sinks=True),
]
EIGHT_BITS = [case._replace(q_scale=(1.0, 0.3, 0.07)[i % 3]) for i, case in enumerate(SIXTEEN_BITS)]
# as on MI300X: 0.33 launches the kernel so, whose lines are those of 0.32
FNUZ = [case._replace(fp8=torch.float8_e4m3fnuz) for case in EIGHT_BITS]
CASES = [*SIXTEEN_BITS, *EIGHT_BITS, *FNUZ]


def check_simulation(library) -> None:
    """Compare our simulation; exact attention has to differ in many more values, or this could not fail."""
    problems, moved, values, least = [], 0.0, 0, 1.0
    for case in CASES:
        query, codes, scales = _inputs(case)
        theirs = _theirs(library, case, query, codes, scales)
        stored = [dequantize(c, s).transpose(0, 1)[None] for c, s in zip(codes, scales, strict=True)]
        dtype = torch.bfloat16 if case.q_scale is None else None
        share, far = _differing(_ours(case, query, stored, dtype), theirs)
        of_exact, _ = _differing(_ours(case, query, stored, torch.float32), theirs)
        moved, values, least = moved + share * theirs.numel(), values + theirs.numel(), min(least, of_exact)
        if far or of_exact < 50 * MOVED:
            problems.append(f"{case}: {far} values differ by more than a step; exact {of_exact:.1e}")
    shares = f"{moved / values:.1e} of all values differ, and {least:.1e} of exact attention"
    problems += [] if moved / values < MOVED else [shares]
    report("simulated", problems, f"{len(CASES)} cases; {shares}")


def _inputs(case: Case) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(case.length + case.num_heads)
    query = torch.randn(case.tokens, case.num_heads, case.head_dim, generator=generator)
    shape = (case.length, case.num_kv_heads, case.head_dim)
    scales = [torch.tensor([scale]) for scale in (case.k_scale, case.v_scale)]
    codes = [quantize(100 * torch.randn(shape, generator=generator), torch.ones(1), case.fp8) for _ in "kv"]
    # scores of a few units, whatever K's scale
    return (query / (40 * case.k_scale)).bfloat16(), codes, scales


def _theirs(library, case: Case, query: Tensor, codes: list[Tensor], scales: list[Tensor]) -> Tensor:
    """The kernel's output [T, H, D] in bfloat16; K and V [N, K, D] in blocks of 16 tokens."""
    q_scale, segments = case.options.q_scale, (1, case.num_heads, _SEGMENTS)
    stored = query if q_scale is None else quantize(query, q_scale, case.fp8)
    padded = [torch.cat([x, x[: -case.length % _BLOCK]]) for x in (c.view(torch.uint8) for c in codes)]
    key, value = (x.unflatten(0, (-1, _BLOCK)).view(case.fp8) for x in padded)
    k_scale, v_scale = (scale.expand(1, case.num_kv_heads) for scale in scales)
    options = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale, "sinks": case.options.sinks}
    options |= {"softcap": case.softcap or 0, "kv_quant_mode": library.KVQuantMode.FP8_PER_TENSOR}
    options["window_size"] = (-1, -1) if case.window is None else (case.window - 1, 0)
    options |= {"seq_threshold_3D": 1, "num_par_softmax_segments": _SEGMENTS}
    options["softmax_segm_output"] = torch.empty(*segments, 1 << (case.head_dim - 1).bit_length())
    options |= {f"softmax_segm_{name}": torch.empty(segments) for name in ("max", "expsum")}
    with patch.object(library.current_platform, "fp8_dtype", lambda: case.fp8):
        out = torch.empty_like(query)
        return interpreted_triton.vllm_attention(stored, key, value, case.length, out, **options)


def _ours(case: Case, query: Tensor, stored: list[Tensor], dtype: torch.dtype | None) -> Tensor:
    """The simulation; with a `dtype` of float32, to which nothing is rounded, exact attention."""
    rows, columns = torch.arange(case.length - case.tokens, case.length)[:, None], torch.arange(case.length)
    visible = (columns <= rows) & (columns > rows - (case.window or case.length))
    heads_first = query.float().transpose(0, 1)[None]
    attention = partial(vllm_triton_attention, dtype=dtype, fp8=case.fp8)
    return attention(heads_first, *stored, visible[None, None], case.options)[0].transpose(0, 1)


def _differing(ours: Tensor, theirs: Tensor) -> tuple[float, int]:
    """Share of values that are another bfloat16, and how many are not even the next one."""
    rounded, theirs = ours.bfloat16().float(), theirs.float()
    step = 2.0**-7 * theirs.abs().maximum(rounded.abs())
    far = (rounded - theirs).abs() > step + _SUMS * theirs.abs().amax()
    return float((rounded != theirs).float().mean()), int(far.sum())


def check_kernels() -> None:
    worst, problems = {"ours": 0.0} | dict.fromkeys(PEERS, 0.0), []
    for case in shrink(TIMED):
        if case.kernel == "append_kv" or case.q_fp8:
            continue
        inputs = per_tensor(build(case, torch.device("cpu")))
        runs = {"ours": call(case, inputs, load_launchers())}
        runs |= {name: peers(case, inputs)[name]() for name, peers in PEERS.items()}
        for name, run in runs.items():
            error = output_error(run().reshape(inputs.query.shape), case, inputs)
            worst[name] = max(worst[name], error)
            if not error <= TOLERANCE:
                problems.append(f"{name} on {case.kernel} {case.name}: relative error {error:.1e}")
    errors = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    report("triton_unified_attention", problems, f"errors: {errors}")


if __name__ == "__main__":
    from vllm.v1.attention.ops import triton_unified_attention

    check_kernels()
    check_simulation(triton_unified_attention)
