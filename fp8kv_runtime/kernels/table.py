"""Tables of configs: JSON, shipped or of this machine; read without Triton.

{"decode": [{"on": "NVIDIA H200", "bits": 8, "head_dim": 128, "tile": 64, "num_warps": 4, ...}]}
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8kv_runtime.errors import AttentionError

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


def tuned_path() -> Path:
    """Return the path of this machine's table: $FP8KV_TUNING, or in the user's cache directory."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("FP8KV_TUNING") or caches / "fp8kv" / "tuning.json")


def read_table(path: Path) -> Table:
    """Read a table; an empty one where the file does not exist.

    Raises:
        AttentionError: the file is not a tuning table, or cannot be read.
    """
    try:
        plain = json.loads(path.read_text())
        return {kernel: tuple(map(_to_row, rows)) for kernel, rows in plain.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise AttentionError(
            f"cannot read {path}: {error.strerror}; set FP8KV_TUNING to another file"
        ) from error
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
