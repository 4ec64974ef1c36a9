"""vLLM's Triton attention kernel beside ours, in Triton's interpreter: the same numbers.

Shows that `make bench-kernels`, where vLLM is installed, times the same work; that two kernels
written apart agree on FP8 blocks, on prompts and on decode; and that `--attention vllm_triton` and
`vllm_triton_fp8` round as the kernel does.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import interpreted_triton  # before Triton
import torch
from kernel_paged_peers import fp8_peers, paged_peers, per_tensor
from kernel_table import CASES as TIMED
from outputs import report
from torch import Tensor

from fp8kv_runtime.bench import correctness
from fp8kv_runtime.bench.cases import build, call, load_launchers, shrink
from fp8kv_runtime.engine_attention import vllm_triton_attention
from fp8kv_runtime.fp8 import dequantize, quantize
from fp8kv_runtime.options import AttentionOptions

PEERS = {"vLLM Triton": paged_peers, "vLLM Triton, FP8": fp8_peers}
_BLOCK, _SEGMENTS = 16, 16
# Sums in fp32 differ by 2^-20 or so between two orders. That moves a value to the next bfloat16
# where it lies so near the middle of two, 2^-8 apart: fewer than one in 500.
MOVED = 1 / 500
_SUMS = 2.0**-20


class Case(NamedTuple):
    """One sequence."""

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
    sinks: bool = False
    fp8: torch.dtype = torch.float8_e4m3fn  # of queries, K and V


# no power of two among the scales: that would leave codes times scale exact in bfloat16
SIXTEEN_BITS = [
    Case(40, 70, 4, 2),
    Case(40, 70, 4, 4, 128, k_scale=1.7, v_scale=0.4),
    Case(33, 130, 6, 2, 80),
    Case(40, 170, 4, 1, window=50),
    Case(40, 70, 4, 2, softcap=5.0),
    Case(40, 70, 4, 2, sinks=True),
    Case(1, 300, 8, 1),
    Case(1, 700, 4, 2, sinks=True),
]
EIGHT_BITS = [case._replace(q_scale=scale) for case, scale in zip(
    SIXTEEN_BITS, (1.0, 0.3, 0.07, 1.0, 0.3, 0.07, 1.0, 0.3), strict=True
)]  # fmt: skip
# as on MI300X: 0.33 launches the kernel so, whose lines are those of 0.32
FNUZ = [case._replace(fp8=torch.float8_e4m3fnuz) for case in EIGHT_BITS]
CASES = [*SIXTEEN_BITS, *EIGHT_BITS, *FNUZ]


def compare_simulation(library: ModuleType) -> tuple[list[str], dict[str, float]]:
    """What is wrong with our simulation; shares of values that differ from the kernel's.

    Of the simulation's values the share of all, of exact attention's that of the least case.
    Exact attention has to differ in many more, or the comparison could not fail.
    """
    problems, moved, values, least = [], 0.0, 0, 1.0
    for case in CASES:
        query, codes, scales = _inputs(case)
        theirs = _theirs(library, case, query, codes, scales)
        stored = [dequantize(c, s).transpose(0, 1)[None] for c, s in zip(codes, scales, strict=True)]
        share, far = _differing(_ours(case, query, stored, _simulated(case)), theirs)
        of_exact, _ = _differing(_ours(case, query, stored, _exact), theirs)
        moved, values = moved + share * theirs.numel(), values + theirs.numel()
        least = min(least, of_exact)
        if far or of_exact < 50 * MOVED:
            problems.append(f"{case}: {far} values differ by more than a step; exact {of_exact:.1e}")
    if not moved / values < MOVED:
        problems.append(f"{moved / values:.1e} of all values differ")
    return problems, {"simulated": moved / values, "exact": least}


def _inputs(case: Case) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(case.length + case.num_heads)
    query = torch.randn(case.tokens, case.num_heads, case.head_dim, generator=generator)
    shape = (case.length, case.num_kv_heads, case.head_dim)
    scales = [torch.tensor([scale]) for scale in (case.k_scale, case.v_scale)]
    codes = [quantize(100 * torch.randn(shape, generator=generator), torch.ones(1), case.fp8) for _ in "kv"]
    # scores of a few units, whatever K's scale
    return (query / (40 * case.k_scale)).bfloat16(), codes, scales


def _theirs(
    library: ModuleType, case: Case, query: Tensor, codes: list[Tensor], scales: list[Tensor]
) -> Tensor:
    """The kernel's output [T, H, D] in bfloat16, launched as vLLM's Triton backend does."""
    out = torch.empty_like(query)
    q_scale = None if case.q_scale is None else torch.tensor([case.q_scale])
    segments = (1, case.num_heads, _SEGMENTS)
    width = 1 << (case.head_dim - 1).bit_length()
    pages = [_pages(x) for x in codes]
    with (
        interpreted_triton.right_casts(),
        patch.object(library.current_platform, "fp8_dtype", lambda: case.fp8),
    ):
        library.unified_attention(
            q=query if q_scale is None else quantize(query, q_scale, case.fp8),
            k=pages[0], v=pages[1], out=out,
            cu_seqlens_q=torch.tensor([0, case.tokens], dtype=torch.int32),
            max_seqlen_q=case.tokens, seqused_k=torch.tensor([case.length], dtype=torch.int32),
            max_seqlen_k=case.length, softmax_scale=case.head_dim**-0.5, causal=True,
            window_size=(-1, -1) if case.window is None else (case.window - 1, 0),
            block_table=torch.arange(len(pages[0]), dtype=torch.int32)[None],
            softcap=case.softcap or 0, q_descale=q_scale,
            k_descale=scales[0].expand(1, case.num_kv_heads),
            v_descale=scales[1].expand(1, case.num_kv_heads), sinks=_sinks(case),
            seq_threshold_3D=1, num_par_softmax_segments=_SEGMENTS,
            softmax_segm_output=torch.empty(*segments, width),
            softmax_segm_max=torch.empty(segments), softmax_segm_expsum=torch.empty(segments),
            kv_quant_mode=library.KVQuantMode.FP8_PER_TENSOR,
        )  # fmt: skip
    return out


def _pages(codes: Tensor) -> Tensor:
    """[N, K, D] as blocks of 16 tokens."""
    missing = -len(codes) % _BLOCK
    padded = torch.cat([codes.view(torch.uint8), codes.view(torch.uint8)[:missing]])
    return padded.unflatten(0, (-1, _BLOCK)).view(codes.dtype)


def _sinks(case: Case) -> Tensor | None:
    return torch.linspace(-2, 4, case.num_heads) if case.sinks else None


def _ours(case: Case, query: Tensor, stored: list[Tensor], attention: Callable[..., Tensor]) -> Tensor:
    rows = torch.arange(case.length - case.tokens, case.length)[:, None]
    columns = torch.arange(case.length)
    visible = columns <= rows
    if case.window is not None:
        visible &= columns > rows - case.window
    q_scale = None if case.q_scale is None else torch.tensor([case.q_scale])
    options = AttentionOptions(softcap=case.softcap, sinks=_sinks(case), q_scale=q_scale)
    heads_first = query.float().transpose(0, 1)[None]
    return attention(heads_first, *stored, visible[None, None], options)[0].transpose(0, 1)


def _simulated(case: Case) -> Callable[..., Tensor]:
    dtype = torch.bfloat16 if case.q_scale is None else None
    return lambda *arguments: vllm_triton_attention(*arguments, dtype=dtype, fp8=case.fp8)


def _exact(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: AttentionOptions) -> Tensor:
    """Attention to the same K and V without more rounding."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.mT * options.scale(query.shape[3])
    if options.softcap is not None:
        scores = options.softcap * (scores / options.softcap).tanh()
    scores = scores.masked_fill(~visible, -torch.inf)
    sinks = torch.full((query.shape[1],), -torch.inf) if options.sinks is None else options.sinks
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ value


def _differing(ours: Tensor, theirs: Tensor) -> tuple[float, int]:
    """Share of values that are another bfloat16, and how many are not even the next one."""
    rounded, theirs = ours.bfloat16().float(), theirs.float()
    step = 2.0**-7 * theirs.abs().maximum(rounded.abs())
    far = (rounded - theirs).abs() > step + _SUMS * theirs.abs().amax()
    return float((rounded != theirs).float().mean()), int(far.sum())


def compare_kernels() -> tuple[list[str], dict[str, float]]:
    """Every tiny case of the benchmark, in 16 bits and in FP8: what is wrong, and the worst errors."""
    cpu, worst, problems = torch.device("cpu"), {"ours": 0.0} | dict.fromkeys(PEERS, 0.0), []
    for case in shrink(TIMED):
        if case.kernel == "append_kv" or case.q_fp8:
            continue
        inputs = per_tensor(build(case, cpu))
        runs = {"ours": call(case, inputs, load_launchers())}
        runs |= {name: peers(case, inputs)[name]() for name, peers in PEERS.items()}
        for name, run in runs.items():
            error = correctness.output_error(run().reshape(inputs.query.shape), case, inputs)
            worst[name] = max(worst[name], error)
            if not error <= correctness.TOLERANCE:
                problems.append(f"{name} on {case.kernel} {case.name}: relative error {error:.1e}")
    return problems, worst


def main() -> None:
    from vllm.v1.attention.ops import triton_unified_attention

    problems, worst = compare_kernels()
    errors = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    report(Path("triton_unified_attention"), problems, f"errors: {errors}")
    problems, worst = compare_simulation(triton_unified_attention)
    shares = ", ".join(f"{name} {share:.1e}" for name, share in worst.items())
    report(Path("simulated"), problems, f"{len(CASES)} cases; differ: {shares}")


if __name__ == "__main__":
    main()
