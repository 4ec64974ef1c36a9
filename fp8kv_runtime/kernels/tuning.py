"""Configs of kernels: looked up in tables, never searched for at first use, and read without Triton.

`tuning.json` comes with the package; this machine's table, which `tools/tune_kernels.py` writes, goes first.

{"decode": [{"on": "NVIDIA H200", "bits": 8, "head_dim": 128, "tile": 64, "num_warps": 4, ...}]}
"""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.kernels.targets import Target, gpu_name, num_processors
from fp8kv_runtime.storage import BlocksLayout, KVBlocks

_MOST_SPLITS = 2048  # the reduce looks at all parts at once
_FEWEST_ROWS = 16  # of a matrix instruction
_TOKENS_PER_ROW = 4  # of a part, at least
_POWERS_OF_TWO = ("tile", "num_warps", "rows")


@dataclass(frozen=True)
class Config:
    """Sizes with which one kernel is compiled and launched."""

    tile: int  # tokens of K and V at a time
    num_warps: int
    # a tile waits for its block's number, so NVIDIA needs 2 n + 1 stages for n tiles in flight
    num_stages: int = 1
    rows: int = 16  # query rows of a program: heads, or heads x tokens
    per_processor: int = 2  # decode: programs of a processor, no more than run at once
    least: int = 4  # decode: tiles of a part; writing and joining it costs as much as reading one
    pairs: int = 2**50  # extend: of a query row and a position, in a call that torch's attention is faster at


@dataclass(frozen=True)
class ConfigRow:
    """A config and where it holds: the first row that fits is taken."""

    on: str  # GPU, target or backend
    bits: int  # of a value in the cache: 8 or 16
    head_dim: int  # at most
    config: Config
    over: int = 0  # head_dim is more than this

    def fits(self, names: Sequence[str], bits: int, head_dim: int, whole: bool = True) -> bool:
        """Return whether it holds for this number format and head_dim on a GPU of these names.

        A warp alone has no registers for queries that are not `whole`, but in two float16 parts.
        """
        inside = self.over < head_dim <= self.head_dim and (whole or self.config.num_warps > 1)
        return self.on in names and self.bits == bits and inside


Table = Mapping[str, tuple[ConfigRow, ...]]  # by kernel: decode, extend


def plan_decode(
    target: Target, query: Tensor, blocks: KVBlocks, longest: int, num_splits: int | None
) -> tuple[Config, int]:
    """Return decode attention's config, and the parts of a head's KV: 0 where each sequence's is one.

    `query` is [S, H, D]. No sequence has more than `longest` tokens.
    """
    _check_splits(num_splits)
    num_kv_heads = blocks.layout.num_kv_heads
    config = attention_config("decode", target, query, blocks)
    least = config.least if num_splits is None else 1
    config = _fit_rows(config, query.shape[1] // num_kv_heads, least)
    splits = num_splits or choose_splits(config.per_processor, num_kv_heads, query.device)
    return config, 0 if splits == 1 or longest <= least * config.tile else splits


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
    config, device = attention_config("extend", target, query, blocks), query.device
    programs = -(-rows // config.rows) * num_kv_heads * num_seqs
    if num_splits == 1 or (num_splits is None and programs >= num_processors(device)):
        return config, 0
    parts = attention_config("decode", target, query, blocks) if rows <= _FEWEST_ROWS else config
    m = min(rows, parts.rows)
    # of a shorter part the rows' sums in float32 are more memory than its K and V
    least = max(parts.least, -(-_TOKENS_PER_ROW * m // parts.tile))
    parts = _fit_rows(parts, m, 1 if num_splits else least)
    if num_splits is None and longest < 2 * least * parts.tile:
        return config, 0
    heads = num_kv_heads * -(-rows // parts.rows)
    return parts, num_splits or choose_splits(max(2, parts.per_processor), heads, device)


def reduce_config(num_splits: int, num_seqs: int) -> Config:
    """Return the reduce's config for about as many sequences; its tile is in parts.

    On an H100 one sequence of 66 parts gained from 32 at a time, 64 sequences lost.
    """
    most, per_seq = next_power_of_2(num_splits), num_splits // num_seqs
    tile = min(most, 32, max(8, next_power_of_2(per_seq)))
    return Config(tile, num_warps=1 if num_splits <= 8 else 4)


def append_config(target: Target, head_dim: int) -> Config:
    """Return append's config: 2,048 values per program, of which a thread stores 16 at a time."""
    tile = max(1, 2048 // next_power_of_2(head_dim))
    return Config(tile, num_warps=2 if target.backend == "hip" else 4)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is at least `number`, of 1 and more; Triton may not be there."""
    return 1 << (number - 1).bit_length()


def choose_splits(per_processor: int, num_heads: int, device: torch.device) -> int:
    """Return parts of a head's KV, all sequences together, that give every processor its programs.

    A KV head counts once for each program that attends to the same part of it.
    """
    programs = per_processor * num_processors(device)
    return max(1, min(programs // num_heads, _MOST_SPLITS))


def query_is_whole(dtype: torch.dtype, blocks: BlocksLayout) -> bool:
    """Return whether a query fits float16: neither float32 nor multiplied by channel scales."""
    return blocks.k_scales < 2 and dtype != torch.float32


def attention_config(kernel: str, target: Target, query: Tensor, blocks: KVBlocks) -> Config:
    """Return the config of "decode" or "extend" for queries [T, H, D], or decode's [S, H, D]."""
    names = (gpu_name(query.device), target.name, target.backend)
    bits, whole = 8 * blocks.codes.itemsize, query_is_whole(query.dtype, blocks.layout)
    return find_config(kernel, names, bits, blocks.layout.head_dim, whole)


@functools.cache
def _fit_rows(config: Config, rows: int, least: int) -> Config:
    return replace(config, rows=max(_FEWEST_ROWS, next_power_of_2(rows)), least=least)


def _check_splits(num_splits: int | None) -> None:
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits must be at least 1, or None to choose, got {num_splits}")


@functools.cache
def find_config(kernel: str, names: tuple[str, ...], bits: int, head_dim: int, whole: bool = True) -> Config:
    """Return the first config that fits, of this machine's table and then of the one shipped.

    `names`: of the GPU, the target and its backend. `whole`: queries fit float16. A ValueError: head_dim is
    too large, or this machine's table cannot be read.
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


def tuned_path() -> Path:
    """Return the path of this machine's table: $FP8KV_TUNING, or in the user's cache directory."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("FP8KV_TUNING") or caches / "fp8kv" / "tuning.json")


def read_table(path: Path) -> Table:
    """Read a table, an empty one where the file does not exist; an AttentionError if it is not a table."""
    try:
        plain = json.loads(path.read_text())
        return {kernel: tuple(map(_to_row, rows)) for kernel, rows in plain.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror}; set FP8KV_TUNING to another file"
        raise AttentionError(problem) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise AttentionError(
            f"{path} is not a tuning table ({type(error).__name__}: {error}); delete it, and the "
            "shipped configs hold"
        ) from error


def _to_row(fields: dict[str, Any]) -> ConfigRow:
    where = {name: fields[name] for name in ("on", "bits", "head_dim")}
    where["over"] = fields.get("over", 0)
    config = {name: value for name, value in fields.items() if name not in where}
    row = ConfigRow(**where, config=Config(**config))
    if row.bits not in (8, 16):
        raise ValueError(f"bits must be 8 or 16, got {row.bits!r}")
    if type(row.over) is not int or row.over < 0:
        raise ValueError(f"over must be an integer, 0 or more, got {row.over!r}")
    for name, value in {"head_dim": row.head_dim, **asdict(row.config)}.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if name in _POWERS_OF_TWO and value & (value - 1):
            raise ValueError(f"{name} must be a power of two, got {value}")
    return row
