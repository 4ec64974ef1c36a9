"""Correctness before speed: every launcher against its reference, at the shapes that are timed."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8kv_runtime import reference
from fp8kv_runtime.bench.cases import Case, Inputs, Launchers, build, call
from fp8kv_runtime.cache import PagedSequences

# softmax weights are rounded to float16 (2^-11) and so is the output: together 2^-10
TOLERANCE = 1e-3
_ROWS = 128  # query rows at a time: the reference holds a score for each, head and position


@dataclass(frozen=True)
class Verdict:
    """Result of comparing a launcher with its reference."""

    ok: bool
    text: str


def check(case: Case, launchers: Launchers, device: torch.device) -> Verdict:
    """Compare one launcher with its reference."""
    inputs = build(case, device)
    if case.kernel == "append_kv":
        return _check_append(case, inputs, launchers)
    # prompts go to torch's attention, but ours is to be right too
    ways: list[dict[str, int]] = [{}, {"num_splits": 1}] if case.kernel == "extend_attention" else [{}]
    outputs = [call(case, inputs, launchers, **options)() for options in ways]
    error = max(output_error(out, case, inputs) for out in outputs if out is not None)
    ok = error <= TOLERANCE  # NaN is not
    return Verdict(ok, f"relative error {error:.1e}" + ("" if ok else f", allowed {TOLERANCE:.0e}"))


def output_error(out: Tensor, case: Case, inputs: Inputs) -> float:
    """Return the norm of `out`'s error over the norm of the reference: the worst head's and window's.

    `out` is [T, H, D], or [S, H, D] in a decode.

    Of many new tokens, the first, the middle and the last are compared: a reference for the rows
    of a window is the same call with a shorter sequence.
    """
    rows = min(case.new, _ROWS)
    worst = torch.zeros((), dtype=torch.float64, device=out.device)
    for offset in sorted({0, (case.new - rows) // 2, case.new - rows}):
        lengths = inputs.sequences.seq_lens - (case.new - offset - rows)
        expected = reference.extend_attention(
            _window(inputs.query, case.new, offset, rows).float(),
            inputs.blocks,
            PagedSequences(inputs.sequences.block_tables, lengths),
            inputs.cu_seqlens // case.new * rows,
            rows,
            inputs.options,
        ).double()
        error = (_window(out, case.new, offset, rows).double() - expected).norm(dim=(0, 2))
        worst = torch.maximum(worst, (error / expected.norm(dim=(0, 2))).amax())
    return float(worst)


def _window(x: Tensor, new: int, offset: int, rows: int) -> Tensor:
    """Take the same rows of every sequence of [T, H, D]."""
    return x.view(-1, new, *x.shape[1:])[:, offset : offset + rows].flatten(0, 1)


def _check_append(case: Case, inputs: Inputs, launchers: Launchers) -> Verdict:
    blocks = inputs.blocks
    counts = None if blocks.counts is None else blocks.counts.clone()
    codes = blocks.codes.view(torch.uint8).clone().view(blocks.codes.dtype)
    expected = replace(blocks, codes=codes, counts=counts)
    reference.append_kv(inputs.key, inputs.value, expected, inputs.slots)
    call(case, inputs, launchers)()
    # as bytes: NaN is unequal to itself
    wrong = int((blocks.codes.view(torch.uint8) != expected.codes.view(torch.uint8)).sum())
    if wrong:
        return Verdict(False, f"{wrong} of {codes.numel()} bytes differ")
    if blocks.counts is not None and counts is not None and not blocks.counts.equal(counts):
        sums = [x.sum((0, 1)).tolist() for x in (blocks.counts, counts)]
        return Verdict(False, f"counts are {sums[0]}, and the reference's {sums[1]}")
    return Verdict(True, "every byte equal" + (" and every count" if case.count else ""))
