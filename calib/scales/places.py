"""Where the largest K and V were, among the tokens of a run and of its samples; without torch.

Counted from 0, token `i` is in bucket floor(log2(i + 1)): bucket b holds the tokens 2**b - 1 to
2**(b + 1) - 2, as many as all before it and one more. What is known is the largest |x| of each.
"""

import math
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.files.names import STATS_FILE
from calib.files.safetensors_header import Entry, read_header, read_metadata, read_values
from calib.files.strict_json import parse_object

BUCKETS = 48  # of the tokens of a run, in the order of reading
POSITION_BUCKETS = 24  # of positions in a sample; bucket 0 is the first token of each
E4M3_MAX = 448.0

_KEY = "fp8kv_stats"
_LETTERS = {"k": ("k", "latent"), "v": ("v", "k_pe")}

Rows = list[list[float]]  # of each head, by bucket


def bucket_of(index: int) -> int:
    """The bucket of the token `index`."""
    return int(index + 1).bit_length() - 1


def first_of(bucket: int) -> int:
    """The first token of a bucket, which is also the number of tokens before it."""
    return (1 << bucket) - 1


@dataclass(frozen=True)
class FirstTokens:
    """Largest magnitudes of K or V of one layer, by position in the sample; None: nobody saw it."""

    position_0: float | None
    positions_1_2: float | None
    rest: float | None
    # what E4M3 would need without the first token of each sample, with no headroom and unrounded
    scale_without_first: float | None


@dataclass(frozen=True)
class TensorPlaces:
    """K or V of one layer."""

    curve: Rows  # by index among the tokens of the run
    positions: Rows  # by position in the sample

    def growth(self, read: int) -> list[tuple[int, float]]:
        """The amax of all heads after so many of the `read` tokens, at the end of each bucket."""
        largest = accumulate(map(max, *self.curve, [0.0] * BUCKETS), max)
        ends = (min(first_of(bucket + 1), read) for bucket in range(bucket_of(read - 1) + 1))
        return [*zip(ends, largest, strict=False)]

    def grew(self, since: int, *, per_head: bool) -> float:
        """By which share the amax, or that of any head, grew from the bucket `since` on."""
        parts = _largest(self.curve, since, per_head=per_head)
        return max((after / before - 1 for before, after in parts if before), default=0.0)

    def first_alone(self, *, per_head: bool) -> float:
        """How many times the largest of all other tokens the first of a sample is."""
        parts = _largest(self.positions, 1, per_head=per_head)
        return max((first / others for first, others in parts if others), default=1.0)

    @property
    def first_tokens(self) -> FirstTokens:
        """What the first positions hold beside all others."""
        first, second, *others = map(max, *self.positions, [0.0] * POSITION_BUCKETS)
        rest = max(others)
        # statistics hold 0 where there was no token
        figures = (first, second, rest, max(second, rest) / E4M3_MAX)
        return FirstTokens(*(figure or None for figure in figures))


@dataclass(frozen=True)
class LayerPlaces:
    """One layer of a run."""

    layer: int
    read: int  # tokens of the run
    k: TensorPlaces
    v: TensorPlaces

    def first_tokens(self) -> dict[str, Any]:
        """The object that `fp8kv inspect --json` prints of the layer."""
        k, v = self.k.first_tokens, self.v.first_tokens
        return {"layer": self.layer, "k": asdict(k), "v": asdict(v)}


def _largest(rows: Rows, bucket: int, *, per_head: bool) -> list[tuple[float, float]]:
    """The largest before `bucket` and from there on, of each head or of all."""
    heads = rows if per_head else [[*map(max, *rows, [0.0] * len(rows[0]))]]
    return [(max(head[:bucket]), max(head[bucket:])) for head in heads]


def middle_of(read: int) -> int:
    """The bucket that begins nearest to the middle of `read` tokens."""
    return max(1, round(math.log2(read)) - 1)


def read_places(directory: Path) -> list[LayerPlaces]:
    """Read the places beside a calibration's scales; none where there are no such statistics."""
    path = directory / STATS_FILE
    if not path.is_file():
        return []
    entries, text = read_header(path), read_metadata(path).get(_KEY, "{}")
    modules = parse_object(text.encode(), f"the metadata of '{path}'").get("modules")
    found = []
    for name, facts in modules.items() if isinstance(modules, dict) else ():
        k, v = (_tensor(path, entries, name, letter) for letter in _LETTERS)
        if k is None or v is None:
            return []
        match facts:
            case {"layer_idx": int(layer), "tokens": int(tokens), "read": int(read)} if (
                layer >= 0 and 1 <= tokens <= read
            ):
                found.append(LayerPlaces(layer, read, k, v))
            case _:
                raise _damaged(path, f"{name[:80]} has no layer_idx, or not the tokens it counted")
    return found


def _tensor(path: Path, entries: dict[str, Entry], name: str, letter: str) -> TensorPlaces | None:
    parts = []
    for field, columns in (("curve", BUCKETS), ("positions", POSITION_BUCKETS), ("amax", None)):
        names = (f"{name}.{called}.{field}" for called in _LETTERS[letter])
        entry = next((entries[each] for each in names if each in entries), None)
        if entry is None:
            return None
        match entry.shape:
            case (heads, step) if heads and step and columns in (None, step):
                values = read_values(path, entry)
            case _:
                raise _damaged(path, f"{field} of {name[:80]} is {[*entry.shape]}")
        if not all(math.isfinite(x) and x >= 0 for x in values):
            raise _damaged(path, f"{field} of {name[:80]} is not finite, or below zero")
        parts.append([values[i : i + step] for i in range(0, len(values), step)])
    curve, positions, amax = parts
    if not [*map(max, curve)] == [*map(max, positions)] == [*map(max, amax)]:
        raise _damaged(path, f"curve, positions and amax of {name[:80]} have not the same largest")
    return TensorPlaces(curve, positions)


def _damaged(path: Path, problem: str) -> InputError:
    return InputError(f"'{path}' is damaged ({problem}); calibrate again")
