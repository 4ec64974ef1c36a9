"""The kernels at a shape: random inputs, every launcher against its reference, then the times on a GPU."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor
from triton.testing import do_bench

import fp8kv_runtime
from fp8kv_runtime import reference
from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.fp8 import fp8_max
from fp8kv_runtime.options import AttentionOptions
from fp8kv_runtime.storage import BLOCK_DTYPES, KVBlocks

# by name: append_kv, which returns nothing, and decode_attention and extend_attention, which return [T, H, D]
Launchers = Mapping[str, Callable[..., Tensor | None]]
Say = Callable[..., None]  # like print
Iterate = Callable[[Sequence["Case"]], Iterator["Case"]]  # goes through cases, and may count them

# softmax weights are rounded to float16 (2^-11) and so is the output: together 2^-10
TOLERANCE = 1e-3
_ROWS = 128  # query rows at a time: the reference holds a score for each, head and position
_K = 1024
_ROUNDS = 3
_DECODED = {
    "1 x 1k": (_K,),
    "1 x 8k": (8 * _K,),
    "1 x 32k": (32 * _K,),
    "8 x 16k": (16 * _K,) * 8,
    "64 x 2k": (2 * _K,) * 64,
}


def load_launchers() -> Launchers:
    """Return the kernels' launchers by the names that their references have too."""
    names = ("append_kv", "decode_attention", "extend_attention")
    return {name: getattr(fp8kv_runtime, name) for name in names}


@dataclass(frozen=True)
class Case:
    """A launcher and the shape of its inputs: one row of a table."""

    kernel: str  # a key of Launchers
    name: str
    lengths: tuple[int, ...]  # tokens in the cache of each sequence, new ones included
    new: int = 1  # new tokens of each sequence
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    q_fp8: bool = False
    count: bool = False
    quick: bool = False  # in the subset of --quick
    format: str = ""  # of the cache, as in BLOCK_DTYPES; empty: E4M3 as the device has it

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return len(self.lengths) * self.new

    @property
    def captures(self) -> bool:
        """Return whether a CUDA graph may time it: a prompt in a graph never goes to torch's attention."""
        return self.kernel != "extend_attention"

    @property
    def num_bytes(self) -> int:
        """Least traffic of K and V: the cache's bytes once; for append also the 16-bit values."""
        stored = 2 if self.format == "float16" else 1
        if self.kernel == "append_kv":
            return 2 * self.num_tokens * self.num_kv_heads * self.head_dim * (2 + stored)
        return 2 * sum(self.lengths) * self.num_kv_heads * self.head_dim * stored


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case, on one device."""

    blocks: KVBlocks
    sequences: PagedSequences
    query: Tensor  # [T, H, D] float16
    cu_seqlens: Tensor  # [S + 1] int32
    options: AttentionOptions
    key: Tensor  # [T, K, D] float16
    value: Tensor  # [T, K, D] float16
    slots: Tensor  # [T] int64


def shrink(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Return one small case of each kind, at sizes for Triton's interpreter."""
    shrunk: dict[Case, Case] = {}
    for case in cases:
        new, *lengths = (max(1, 100 * n // max(case.lengths)) for n in (case.new, *case.lengths[:2]))
        small = replace(case, name=f"like {case.name}", lengths=tuple(lengths), new=new)
        small = replace(small, num_heads=2 * case.num_heads // case.num_kv_heads, num_kv_heads=2)
        shrunk.setdefault(replace(small, name="", quick=False), small)
    return tuple(shrunk.values())


def build(case: Case, device: torch.device) -> Inputs:
    """Draw a case: always the same numbers on the same device; blocks in no order."""
    random = torch.Generator(device).manual_seed(0)
    sequences, num_blocks = _sequences(case, device)
    heads = (case.num_tokens, case.num_heads, case.head_dim)
    kv_heads = (case.num_tokens, case.num_kv_heads, case.head_dim)
    query, key, value = (
        torch.randn(shape, generator=random, device=device).half() for shape in (heads, kv_heads, kv_heads)
    )
    q_scale = torch.full((case.num_heads,), 5 / fp8_max(_dtype(case, device)), device=device)
    return Inputs(
        blocks=_blocks(case, num_blocks, random),
        sequences=sequences,
        query=query,
        cu_seqlens=torch.arange(len(case.lengths) + 1, dtype=torch.int32, device=device) * case.new,
        options=AttentionOptions(q_scale=q_scale if case.q_fp8 else None),
        key=_plant_extremes(key),
        value=_plant_extremes(value),
        slots=_slots(case, sequences),
    )


def call(case: Case, inputs: Inputs, launchers: Launchers, **options: int) -> Callable[[], Tensor | None]:
    """Bind the launcher to its inputs; the call can be repeated, and attention returns [T, H, D]."""
    run, blocks = launchers[case.kernel], inputs.blocks
    if case.kernel == "append_kv":
        return lambda: run(inputs.key, inputs.value, blocks, inputs.slots)
    if case.kernel == "decode_attention":
        return lambda: run(inputs.query, blocks, inputs.sequences, inputs.options, **options)
    arguments = (inputs.query, blocks, inputs.sequences, inputs.cu_seqlens, case.new, inputs.options)
    return lambda: run(*arguments, **options)


def _dtype(case: Case, device: torch.device) -> torch.dtype:
    own = "e4m3fn"
    if torch.version.hip and device.type == "cuda":
        name = torch.cuda.get_device_properties(device).gcnArchName
        own = "e4m3fnuz" if name.startswith("gfx94") else own
    return BLOCK_DTYPES[case.format or own]


def _sequences(case: Case, device: torch.device) -> tuple[PagedSequences, int]:
    counts = [-(-n // case.block_size) for n in case.lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    tables = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    for row, ids in zip(tables, torch.split(order, counts), strict=True):
        row[: len(ids)] = ids
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    return PagedSequences(tables, lengths).to(device), sum(counts)


def _slots(case: Case, sequences: PagedSequences) -> Tensor:
    new = torch.arange(case.new, device=sequences.seq_lens.device)
    positions = sequences.seq_lens[:, None].long() - case.new + new
    ids = sequences.block_tables.long().gather(1, positions // case.block_size)
    return (ids * case.block_size + positions % case.block_size).flatten()


def _blocks(case: Case, num_blocks: int, random: torch.Generator) -> KVBlocks:
    """Draw K and V of about one, four standard deviations of which fit; one scale per head."""
    device = random.device
    dtype = _dtype(case, device)
    limit = fp8_max(dtype)
    k_scale, v_scale = (
        (0.5 + torch.rand(case.num_kv_heads, generator=random, device=device)) * 4 / limit for _ in "kv"
    )
    blocks = KVBlocks.empty(
        num_blocks, case.block_size, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim,
        k_scale=k_scale, v_scale=v_scale, dtype=dtype, device=device, count=case.count,
    )  # fmt: skip
    for part in torch.split(blocks.codes.view(torch.uint8).flatten(0, 1), 512):  # to save memory
        shape = (*part.shape[:-1], case.head_dim)
        x = torch.randn(shape, generator=random, device=device) * (limit / 4)
        part.copy_(x.clamp_(-limit, limit).to(dtype).view(torch.uint8))
    return blocks


def _plant_extremes(x: Tensor) -> Tensor:
    """Write extreme values into `x`, far apart: some that append counts, some that it must not count."""
    extremes = torch.tensor([torch.inf, -torch.inf, torch.nan, 6e4, -6e4, 1e-6, -1e-6, 0.0])
    x.view(-1)[:: x.numel() // len(extremes)][: len(extremes)] = extremes.to(x)
    return x


@dataclass(frozen=True)
class Verdict:
    """Result of comparing a launcher with its reference."""

    ok: bool
    text: str


def check(case: Case, launchers: Launchers, device: torch.device, *, also_split: bool = False) -> Verdict:
    """Compare one launcher with its reference; if `also_split`, with the sequences in two parts too."""
    inputs = build(case, device)
    if case.kernel == "append_kv":
        return _check_append(case, inputs, launchers)
    # prompts go to torch's attention, and short sequences are not split, but all of ours is to be right
    ways: list[dict[str, int]] = [{}, {"num_splits": 1}] if case.kernel == "extend_attention" else [{}]
    if also_split:
        ways.append({"num_splits": 2})
    outputs = [call(case, inputs, launchers, **options)() for options in ways]
    error = max(output_error(out, case, inputs) for out in outputs if out is not None)
    ok = error <= TOLERANCE  # NaN is not
    return Verdict(ok, f"relative error {error:.1e}" + ("" if ok else f", allowed {TOLERANCE:.0e}"))


def output_error(out: Tensor, case: Case, inputs: Inputs) -> float:
    """Return the norm of the error of `out` [T, H, D] over the reference's: the worst head's and window's.

    Of many new tokens, the first, the middle and the last are compared: a reference for the rows
    of a window is the same call with a shorter sequence.
    """
    rows = min(case.new, _ROWS)
    worst = torch.zeros((), dtype=torch.float64, device=out.device)
    for offset in sorted({0, (case.new - rows) // 2, case.new - rows}):
        lengths = inputs.sequences.seq_lens - (case.new - offset - rows)
        expected = reference.extend_attention(
            _window(inputs.query, case.new, offset, rows).float(), inputs.blocks,
            PagedSequences(inputs.sequences.block_tables, lengths), inputs.cu_seqlens // case.new * rows,
            rows, inputs.options,
        ).double()  # fmt: skip
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


@dataclass(frozen=True)
class KernelTime:
    """Times of one case on the GPU with a cold L2, on a cache of FP8 and on one of float16."""

    kernel: str
    case: str
    us: float
    tb_per_s: float  # of K and V in FP8
    float16_us: float


def bench_cases(heads: tuple[int, int, int], block_size: int, device: torch.device) -> tuple[Case, ...]:
    """Return decode at lengths from 1k to 32k, a prompt of 8k, and storing: small without a GPU.

    `heads` are query heads, KV heads and head_dim.
    """
    shape = (*heads, block_size)
    cases = (
        Case("append_kv", "1 token of each of 64", (2 * _K,) * 64, 1, *shape),
        *(Case("decode_attention", name, n, 1, *shape) for name, n in _DECODED.items()),
        Case("extend_attention", "prompt of 8k", (8 * _K,), 8 * _K, *shape),
    )
    return cases if device.type == "cuda" else shrink(cases)


def check_cases(
    cases: Sequence[Case], launchers: Launchers, device: torch.device, say: Say, iterate: Iterate = iter
) -> list[str]:
    """Check every case on FP8 and on float16, say a line for each, and return the wrong ones' names."""
    wrong = []
    for case in iterate(cases):
        for form in (case,) if case.q_fp8 else (case, replace(case, format="float16")):
            # named first because the kernel may crash
            say(f"{form.kernel:17} {form.name:35} {form.format:7} ", end="", flush=True)
            verdict = check(form, launchers, device, also_split=form.new == 1)
            say(f"{'ok   ' if verdict.ok else 'WRONG'} {verdict.text}", flush=True)
            if not verdict.ok:
                wrong.append(f"{form.kernel} {form.name} {form.format}".strip())
    return wrong


def time_cases(
    cases: Sequence[Case], launchers: Launchers, device: torch.device, iterate: Iterate = iter
) -> tuple[float, list[KernelTime]]:
    """Return TB/s of a copy within the GPU's memory, and the times of every case."""
    rows = []
    for case in iterate(cases):
        runs = [
            call(form, build(form, device), launchers) for form in (case, replace(case, format="float16"))
        ]
        # in turn, so that clocks that drift hit both alike
        rounds = [[time_on_gpu(run, case.captures) for run in runs] for _ in range(_ROUNDS)]
        us, float16_us = map(median, zip(*rounds, strict=True))
        rows.append(KernelTime(case.kernel, case.name, us, case.num_bytes / us / 1e6, float16_us))
    source, target = torch.zeros(2, 2**30, dtype=torch.uint8, device=device)
    copy_us = time_on_gpu(lambda: target.copy_(source))
    return 2 * source.numel() / copy_us / 1e6, rows


def time_on_gpu(run: Callable[[], object], captures: bool = True) -> float:
    """Return microseconds of `run` on the GPU: the median of a graph's replays, without Python.

    Where it is not to be captured, or cannot be, its launches are in it. `do_bench` empties the L2 before
    each replay; `do_bench_cudagraph` would find K and V there.
    """
    run()  # what is compiled at first use cannot be captured
    replay = run
    if captures:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
            replay = graph.replay
        except RuntimeError:  # it cannot be captured, as where it waits for the GPU
            torch.cuda.synchronize()
    return 1e3 * float(do_bench(replay, return_mode="median"))
