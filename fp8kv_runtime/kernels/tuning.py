"""Which config each kernel is launched with: looked up, never searched for at first use.

`tuning.json` comes with the package; what `fp8kv bench --tune` measured on this machine goes first.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import triton
from torch import Tensor

from fp8kv_runtime.kernels.table import Config, Table, read_table, tuned_path
from fp8kv_runtime.kernels.targets import Target, gpu_name, num_processors
from fp8kv_runtime.storage import KVBlocks

_MOST_SPLITS = 512  # the reduce looks at all parts at once

_pinned: dict[str, Config] = {}


def decode_config(target: Target, query: Tensor, blocks: KVBlocks) -> Config:
    """Config of decode attention for queries [S, H, D]."""
    config = _config("decode", target, query.device, blocks)
    return _with_rows(config, query.shape[1] // blocks.layout.num_kv_heads)


def extend_config(target: Target, device: torch.device, blocks: KVBlocks) -> Config:
    """Config of extend attention."""
    return _config("extend", target, device, blocks)


def reduce_config(num_splits: int) -> Config:
    """Config of the reduce; its tile is in parts."""
    return Config(
        tile=min(8, triton.next_power_of_2(num_splits)), num_warps=1 if num_splits <= 8 else 4
    )


def append_config(target: Target, head_dim: int) -> Config:
    """Config of append: 2,048 values per program, of which a thread stores 16 at a time."""
    tile = max(1, 2048 // triton.next_power_of_2(head_dim))
    return Config(tile, num_warps=2 if target.backend == "hip" else 4)


def choose_splits(config: Config, num_kv_heads: int, device: torch.device) -> int:
    """Parts of a head's KV, all sequences together, that give every processor its programs."""
    programs = config.per_processor * num_processors(device)
    return max(1, min(programs // num_kv_heads, _MOST_SPLITS))


@functools.cache
def find_config(kernel: str, names: tuple[str, ...], bits: int, head_dim: int) -> Config:
    """The first config that fits, of those tuned on this machine and then of those shipped.

    `names`: of the GPU, the target and its backend.

    Raises:
        ValueError: head_dim is too large, or the tuned table cannot be read.
    """
    if kernel in _pinned:
        return _pinned[kernel]
    rows = [*tuned().get(kernel, ()), *shipped()[kernel]]
    for row in rows:
        if row.fits(names, bits, head_dim):
            return row.config
    most = max(row.head_dim for row in rows)
    raise ValueError(f"head_dim {head_dim} is more than the {most} that kernels handle")


@contextlib.contextmanager
def pinned(kernel: str, config: Config) -> Iterator[None]:
    """Inside, this kernel is launched with this config."""
    _pinned[kernel] = config
    find_config.cache_clear()
    try:
        yield
    finally:
        del _pinned[kernel]
        find_config.cache_clear()


@functools.cache
def shipped() -> Table:
    """The table that comes with the package."""
    return read_table(Path(__file__).with_name("tuning.json"))


@functools.cache
def tuned() -> Table:
    """This machine's own table, as it was when first asked for."""
    return read_table(tuned_path())


def forget_tuned() -> None:
    """Read this machine's table again, which was written anew."""
    tuned.cache_clear()
    find_config.cache_clear()


@functools.cache
def _with_rows(config: Config, group: int) -> Config:
    # matrix instructions take 16 rows at least
    return replace(config, rows=max(16, triton.next_power_of_2(group)))


def _config(kernel: str, target: Target, device: torch.device, blocks: KVBlocks) -> Config:
    names = (gpu_name(device), target.name, target.backend)
    return find_config(kernel, names, 8 * blocks.codes.itemsize, blocks.layout.head_dim)
