"""Layers of a paged FP8 cache: values rounded by torch's own cast, written block by block, all else NaN."""

from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

MODULES = (
    "fp8", "storage", "cache", "options", "reference",
    "kernels.codec", "kernels.append_kv", "kernels.attention",
)  # fmt: skip
FORMATS = ("e4m3fn", "e4m3fnuz", "e5m2")
NAN_CODE = {"e4m3fn": 0x7F, "e4m3fnuz": 0x80, "e5m2": 0x7F, "float16": 0x7F}  # each byte


def load_runtime(package="fp8kv_runtime"):
    return SimpleNamespace(**{name.split(".")[-1]: import_module(f"{package}.{name}") for name in MODULES})


RUNTIME = load_runtime()


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]  # tokens in the cache
    query_lens: tuple[int, ...] | None = None  # None: decode, one token each
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    format: str = "e4m3fn"
    k_scales: str = "head"  # tensor, head, channel
    v_scales: str = "head"
    center: bool = False
    window: int | None = None
    softcap: float | None = None
    softmax_scale: float | None = None
    sinks: bool = False
    starts: tuple[int, ...] | None = None  # width of left padding
    q_scale: str | None = None  # tensor, head
    num_splits: int | None = None  # of decode
    extend_splits: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    query: torch.Tensor
    blocks: Any
    sequences: Any
    cu_seqlens: torch.Tensor
    max_query_len: int
    options: Any
    num_splits: int | None
    decodes: bool
    extend_splits: int | None = None

    def attend(self, implementation, runtime=RUNTIME):
        module = runtime.reference if implementation == "reference" else runtime.attention
        layer = self.query, self.blocks, self.sequences
        if self.decodes:
            return module.decode_attention(*layer, self.options, num_splits=self.num_splits)
        queries = self.cu_seqlens, self.max_query_len, self.options
        return module.extend_attention(*layer, *queries, num_splits=self.extend_splits)


def build(case, device="cpu", runtime=RUNTIME):
    """Draw a batch: K about ten times V, every head of its own magnitude, blocks in any order."""
    random, decodes = torch.Generator().manual_seed(case.seed), case.query_lens is None
    query_lens = [1] * len(case.lengths) if decodes else case.query_lens
    heads = case.kv_heads * case.group
    query = torch.randn(sum(query_lens), heads, case.head_dim, generator=random) * 1.5
    blocks, tables = _layer(case, random, device, runtime)
    starts = None if case.starts is None else torch.tensor(case.starts, dtype=torch.int32)
    sequences = runtime.cache.PagedSequences(tables, torch.tensor(case.lengths, dtype=torch.int32), starts)
    ends = torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32)
    options = _options(case, heads, random, runtime).to(torch.device(device))
    layer = query.to(case.dtype).to(device), blocks, sequences.to(torch.device(device)), ends
    parts = case.num_splits, decodes, case.extend_splits
    return Batch(*layer, max(query_lens, default=0), options, *parts)


def store(stored, table, start, codes):
    stored, codes = stored.view(torch.uint8), codes.view(torch.uint8).to(stored.device)
    block_size = stored.shape[2]
    for index, code in enumerate(codes, start):
        stored[int(table[index // block_size]), :, index % block_size] = code


def poisoned(num_blocks, case, device):
    row = case.head_dim * (2 if case.format == "float16" else 1)
    shape = (2, num_blocks, case.kv_heads, case.block_size, row)
    return torch.full(shape, NAN_CODE[case.format], dtype=torch.uint8, device=device)


def _layer(case, random, device, runtime):
    dtype = runtime.storage.BLOCK_DTYPES[case.format]
    needed = [-(-length // case.block_size) for length in case.lengths]
    order = torch.randperm(sum(needed) + 3, generator=random)[: sum(needed)].tolist()
    tables = torch.full((len(needed), max(needed, default=0)), -1, dtype=torch.int32)
    for row, count in zip(tables, needed, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)])
    codes = poisoned(sum(needed) + 3, case, device).view(dtype)
    limit, scales = torch.finfo(dtype).max, []
    shapes = {"tensor": (1,), "head": (case.kv_heads,), "channel": (case.kv_heads, case.head_dim)}
    for stored, kind, typical in ((codes[0], case.k_scales, 1.2), (codes[1], case.v_scales, 0.1)):
        spread = 0.5 + torch.rand(shapes[kind], generator=random)
        scales.append((spread * typical * 4 / limit).to(device))
        for s, length in enumerate(case.lengths):
            first = 0 if case.starts is None else case.starts[s]  # padding is poison too
            shape = (max(length - first, 0), case.kv_heads, case.head_dim)
            # four standard deviations fit: a few values saturate
            x = torch.randn(shape, generator=random) * limit / 4
            store(stored, tables[s], first, x.clamp(-limit, limit).to(dtype))
    center = torch.randn(case.kv_heads, case.head_dim, generator=random).to(device) if case.center else None
    return runtime.storage.KVBlocks(codes, *scales, k_center=center), tables


def _options(case, heads, random, runtime):
    q_scale = None
    if case.q_scale is not None:
        limit = torch.finfo(runtime.fp8.FP8_DTYPES[case.format]).max
        spread = 0.5 + torch.rand(1 if case.q_scale == "tensor" else heads, generator=random)
        q_scale = spread * 6 / limit
    # about as large as the logarithm of a sum over 50 tokens: it matters and does not rule
    sinks = torch.randn(heads, generator=random) + 4 if case.sinks else None
    limits = {"sliding_window": case.window, "softcap": case.softcap, "sinks": sinks}
    return runtime.options.AttentionOptions(softmax_scale=case.softmax_scale, q_scale=q_scale, **limits)
