"""Tile sizes, warps and stages, as data; and how many parts decode splits the KV into."""

from dataclasses import dataclass, replace

import triton

from fp8kv_runtime.kernels.targets import Target

LEAST_TILES = 4  # of a part of decode: writing and joining it costs as much as reading a fourth


@dataclass(frozen=True)
class Config:
    """How one kernel is compiled."""

    tile: int  # tokens of K and V at a time
    num_warps: int
    num_stages: int = 1
    rows: int = 16  # query rows of a program: heads, or heads x tokens


# (backend or target, at most this head_dim) -> config: the first that fits
# A tile waits for its block's number, so NVIDIA needs 2 n + 1 stages for n tiles in flight
_DECODE = (
    ("cuda", 64, Config(tile=128, num_warps=4, num_stages=5)),
    ("cuda", 128, Config(tile=64, num_warps=4, num_stages=5)),
    ("cuda", 256, Config(tile=32, num_warps=4, num_stages=5)),
    ("hip", 128, Config(tile=64, num_warps=4, num_stages=2)),
    ("hip", 256, Config(tile=32, num_warps=4, num_stages=1)),
    ("interpreter", 256, Config(tile=64, num_warps=4)),
)
_EXTEND = (
    ("sm_90", 128, Config(tile=64, num_warps=8, num_stages=3, rows=128)),
    ("cuda", 64, Config(tile=64, num_warps=8, num_stages=3, rows=128)),
    ("cuda", 128, Config(tile=32, num_warps=8, num_stages=3, rows=128)),
    ("cuda", 256, Config(tile=32, num_warps=8, num_stages=3, rows=64)),
    ("hip", 128, Config(tile=64, num_warps=4, num_stages=1, rows=64)),
    ("hip", 256, Config(tile=32, num_warps=4, num_stages=1, rows=32)),
    ("interpreter", 256, Config(tile=64, num_warps=4, rows=64)),
)


def decode_config(target: Target, head_dim: int, group: int) -> Config:
    """Config of decode attention for `group` query heads per KV head."""
    return _with_rows(_find(_DECODE, target, head_dim), group)


def extend_config(target: Target, head_dim: int) -> Config:
    """Config of extend attention."""
    return _find(_EXTEND, target, head_dim)


def reduce_config(num_splits: int) -> Config:
    """Config of the reduce; its tile is in parts."""
    return Config(
        tile=min(8, triton.next_power_of_2(num_splits)), num_warps=1 if num_splits <= 8 else 4
    )


def append_config(target: Target, head_dim: int) -> Config:
    """Config of append: 2,048 values per program, of which a thread stores 16 at a time."""
    tile = max(1, 2048 // triton.next_power_of_2(head_dim))
    return Config(tile, num_warps=2 if target.backend == "hip" else 4)


def choose_splits(num_kv_heads: int, num_processors: int) -> int:
    """Parts of a head's KV, all sequences together, so that every processor gets about two."""
    return max(1, min(-(-2 * num_processors // num_kv_heads), 128))


def _find(table: tuple[tuple[str, int, Config], ...], target: Target, head_dim: int) -> Config:
    for where, at_most, config in table:
        if where in (target.backend, target.name) and head_dim <= at_most:
            return config
    raise ValueError(f"head_dim {head_dim} is more than the {table[-1][1]} that kernels handle")


def _with_rows(config: Config, group: int) -> Config:
    # matrix instructions take 16 rows at least
    return replace(config, rows=max(16, triton.next_power_of_2(group)))
