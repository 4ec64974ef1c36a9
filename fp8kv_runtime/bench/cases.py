"""Benchmark cases: a launcher, a shape, random inputs of that shape, and the call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fp8kv_runtime
from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.fp8 import fp8_max
from fp8kv_runtime.options import AttentionOptions
from fp8kv_runtime.storage import BLOCK_DTYPES, KVBlocks

# by name: append_kv, which returns nothing, and decode_attention and extend_attention, which return [T, H, D]
Launchers = Mapping[str, Callable[..., Tensor | None]]


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
        """Leave to time it as a CUDA graph, in which prompts never go to torch's attention."""
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
        longest = max(case.lengths)
        lengths = tuple(max(1, 100 * n // longest) for n in case.lengths[:2])
        group = case.num_heads // case.num_kv_heads
        small = replace(
            case,
            name=f"like {case.name}",
            lengths=lengths,
            new=max(1, 100 * case.new // longest),
            num_heads=2 * group,
            num_kv_heads=2,
        )
        shrunk.setdefault(replace(small, name="", quick=False), small)
    return tuple(shrunk.values())


def store_as_float16(case: Case) -> Case:
    """Put the cache in float16, which takes no FP8 queries."""
    return replace(case, format="float16")


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
        return lambda: run(inputs.query, blocks, inputs.sequences, inputs.options)
    arguments = (inputs.query, blocks, inputs.sequences, inputs.cu_seqlens, case.new, inputs.options)
    return lambda: run(*arguments, **options)


def _dtype(case: Case, device: torch.device) -> torch.dtype:
    if case.format:
        return BLOCK_DTYPES[case.format]
    if torch.version.hip and device.type == "cuda":
        name = torch.cuda.get_device_properties(device).gcnArchName
        return BLOCK_DTYPES["e4m3fnuz" if name.startswith("gfx94") else "e4m3fn"]
    return BLOCK_DTYPES["e4m3fn"]


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
        num_blocks,
        case.block_size,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        k_scale=k_scale,
        v_scale=v_scale,
        dtype=dtype,
        device=device,
        count=case.count,
    )
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
