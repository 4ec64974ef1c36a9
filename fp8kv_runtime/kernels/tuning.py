"""Configs of kernels: looked up in tables, never searched for at first use.

`tuning.json` comes with the package; this machine's table, which `tools/tune_kernels.py` writes, goes first.
"""

import functools
from dataclasses import replace
from pathlib import Path

import torch
import triton
from torch import Tensor

from fp8kv_runtime.kernels.table import Config, Table, read_table, tuned_path
from fp8kv_runtime.kernels.targets import Target, gpu_name, num_processors
from fp8kv_runtime.storage import BlocksLayout, KVBlocks

_MOST_SPLITS = 2048  # the reduce looks at all parts at once
_FEWEST_ROWS = 16  # of a matrix instruction
_TOKENS_PER_ROW = 4  # of a part, at least


def plan_decode(
    target: Target, query: Tensor, blocks: KVBlocks, longest: int, num_splits: int | None
) -> tuple[Config, int]:
    """Return decode attention's config, and the parts of a head's KV: 0 where each sequence's is one.

    `query` is [S, H, D]. No sequence has more than `longest` tokens.
    """
    _check_splits(num_splits)
    num_kv_heads = blocks.layout.num_kv_heads
    config = _config("decode", target, query, blocks)
    least = config.least if num_splits is None else 1
    config = _fit_rows(config, query.shape[1] // num_kv_heads, least)
    splits = num_splits or choose_splits(config.per_processor, num_kv_heads, query.device)
    return config, 0 if splits == 1 or longest <= least * config.tile else splits


def extend_config(target: Target, query: Tensor, blocks: KVBlocks) -> Config:
    """Return extend attention's config for queries [T, H, D]."""
    return _config("extend", target, query, blocks)


def plan_extend(
    target: Target, query: Tensor, blocks: KVBlocks, num_seqs: int, rows: int, longest: int,
    num_splits: int | None,
) -> tuple[Config, int]:  # fmt: skip
    """Return extend attention's config, and the parts of a head's KV: 0 where it is not split.

    `query` is [T, H, D]. At most `rows` (token, query head) pairs of a KV head see at most `longest` tokens.
    Heads are not split if they fill the GPU, or if their KV is so short that it makes one part.
    """
    _check_splits(num_splits)
    num_kv_heads = blocks.layout.num_kv_heads
    config, device = extend_config(target, query, blocks), query.device
    programs = triton.cdiv(rows, config.rows) * num_kv_heads * num_seqs
    if num_splits == 1 or (num_splits is None and programs >= num_processors(device)):
        return config, 0
    parts = _config("decode", target, query, blocks) if rows <= _FEWEST_ROWS else config
    m = min(rows, parts.rows)
    # of a shorter part the rows' sums in float32 are more memory than its K and V
    least = max(parts.least, triton.cdiv(_TOKENS_PER_ROW * m, parts.tile))
    parts = _fit_rows(parts, m, 1 if num_splits else least)
    if num_splits is None and longest < 2 * least * parts.tile:
        return config, 0
    heads = num_kv_heads * triton.cdiv(rows, parts.rows)
    return parts, num_splits or choose_splits(max(2, parts.per_processor), heads, device)


def reduce_config(num_splits: int, num_seqs: int) -> Config:
    """Return the reduce's config for about as many sequences; its tile is in parts.

    On an H100 one sequence of 66 parts gained from 32 at a time, 64 sequences lost.
    """
    most, per_seq = triton.next_power_of_2(num_splits), num_splits // num_seqs
    tile = min(most, 32, max(8, triton.next_power_of_2(per_seq)))
    return Config(tile, num_warps=1 if num_splits <= 8 else 4)


def append_config(target: Target, head_dim: int) -> Config:
    """Return append's config: 2,048 values per program, of which a thread stores 16 at a time."""
    tile = max(1, 2048 // triton.next_power_of_2(head_dim))
    return Config(tile, num_warps=2 if target.backend == "hip" else 4)


def choose_splits(per_processor: int, num_heads: int, device: torch.device) -> int:
    """Return parts of a head's KV, all sequences together, that give every processor its programs.

    A KV head counts once for each program that attends to the same part of it.
    """
    programs = per_processor * num_processors(device)
    return max(1, min(programs // num_heads, _MOST_SPLITS))


def query_is_whole(dtype: torch.dtype, blocks: BlocksLayout) -> bool:
    """Return whether a query fits float16: neither float32 nor multiplied by channel scales."""
    return blocks.k_scales < 2 and dtype != torch.float32


def _config(kernel: str, target: Target, query: Tensor, blocks: KVBlocks) -> Config:
    names = (gpu_name(query.device), target.name, target.backend)
    bits, whole = 8 * blocks.codes.itemsize, query_is_whole(query.dtype, blocks.layout)
    return find_config(kernel, names, bits, blocks.layout.head_dim, whole)


@functools.cache
def _fit_rows(config: Config, rows: int, least: int) -> Config:
    return replace(config, rows=max(_FEWEST_ROWS, triton.next_power_of_2(rows)), least=least)


def _check_splits(num_splits: int | None) -> None:
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits must be at least 1, or None to choose, got {num_splits}")


@functools.cache
def find_config(kernel: str, names: tuple[str, ...], bits: int, head_dim: int, whole: bool = True) -> Config:
    """Return the first config that fits, of this machine's table and then of the one shipped.

    `names`: of the GPU, the target and its backend. `whole`: queries fit float16.

    Raises:
        ValueError: head_dim is too large, or this machine's table cannot be read.
    """
    rows = [*tuned().get(kernel, ()), *shipped()[kernel]]
    for row in rows:
        if row.fits(names, bits, head_dim, whole):
            return row.config
    most = max(row.head_dim for row in rows)
    raise ValueError(f"head_dim {head_dim} is more than the {most} that kernels handle")


@functools.cache
def shipped() -> Table:
    """Return the table that comes with the package."""
    return read_table(Path(__file__).with_name("tuning.json"))


@functools.cache
def tuned() -> Table:
    """Return this machine's own table, as it was at the first call."""
    return read_table(tuned_path())


def forget_tuned() -> None:
    """Read this machine's table again at the next call."""
    tuned.cache_clear()
    find_config.cache_clear()
