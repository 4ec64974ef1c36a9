"""The places of the largest K and V: among the tokens of a run, and in its samples; without torch.

Counted from 0, token `i` is in bucket floor(log2(i + 1)): bucket b holds the tokens 2**b - 1 to
2**(b + 1) - 2, as many as all before it and one more. The largest |x| of each bucket is known.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from calib.errors import InputError, first_problem
from calib.files.names import STATS_FILE
from calib.files.safetensors_header import Entry, read_header, read_metadata, read_values
from calib.files.strict_json import parse_object

BUCKETS = 48  # of the tokens of a run, in the order of reading
POSITION_BUCKETS = 24  # of positions in a sample; bucket 0 is the first token of each
STATS_KEY = "fp8kv_stats"  # of the metadata in a file of statistics
_MOST_TOKENS = 2 ** (BUCKETS - 1)  # two such runs, one after the other, fit into the buckets

Rows = list[list[float]]  # of each head, by bucket


def bucket_of(index: int) -> int:
    """Return the bucket of the token `index`."""
    return int(index + 1).bit_length() - 1


def first_of(bucket: int) -> int:
    """Return the first token of a bucket, which is also the number of tokens before it."""
    return (1 << bucket) - 1


def middle_of(read: int) -> int:
    """Return the bucket that begins nearest to the middle of `read` tokens."""
    return max(1, round(math.log2(read)) - 1)


class ModuleFacts(BaseModel):
    """An attention module, with the tokens it counted and read."""

    model_config = ConfigDict(strict=True)
    layer_idx: NonNegativeInt
    tokens: int = Field(ge=1, lt=_MOST_TOKENS)
    read: int = Field(lt=_MOST_TOKENS)
    estimated: list[Literal["k", "v"]] = []
    unbounded: list[Literal["k", "v"]] | None = None

    @model_validator(mode="after")
    def _check_tokens(self) -> "ModuleFacts":
        if self.read < self.tokens:
            raise ValueError(f"{self.tokens} tokens counted and {self.read} read")
        return self


@dataclass(frozen=True)
class TensorPlaces:
    """K or V of one layer."""

    curve: Rows  # by index among the tokens of the run
    positions: Rows  # by position in the sample

    def growth(self, read: int) -> list[tuple[int, float]]:
        """Return the amax of all heads after so many of the `read` tokens, at the end of each bucket."""
        ends = (min(first_of(bucket + 1), read) for bucket in range(bucket_of(read - 1) + 1))
        return [*zip(ends, accumulate(_largest(self.curve), max), strict=False)]

    def grew(self, since: int, *, per_head: bool) -> float:
        """Return the share by which the amax, or that of any head, grew from the bucket `since` on."""
        heads = self.curve if per_head else [_largest(self.curve)]
        return max((max(x[since:]) / max(x[:since]) - 1 for x in heads if any(x[:since])), default=0.0)

    def first_alone(self, *, per_head: bool) -> float:
        """Return the first token of a sample in multiples of the largest of all others."""
        heads = self.positions if per_head else [_largest(self.positions)]
        return max((x[0] / max(x[1:]) for x in heads if any(x[1:])), default=1.0)

    def first_tokens(self, limit: float) -> dict[str, float | None]:
        """Return the largest at the first positions and at all others; None without a token there.

        `scale_without_first` is what an FP8 type that ends at `limit` would need without the first token of
        each sample, with no headroom and unrounded.
        """
        first, second, *later = _largest(self.positions)
        figures = {"position_0": first, "positions_1_2": second, "rest": max(later)}
        figures["scale_without_first"] = max(second, *later) / limit
        return {name: figure or None for name, figure in figures.items()}


@dataclass(frozen=True)
class LayerPlaces:
    """The places of one layer of a run."""

    layer: int
    read: int  # tokens of the run
    k: TensorPlaces
    v: TensorPlaces


def read_places(directory: Path) -> list[LayerPlaces]:
    """Read the places beside a calibration's scales; none where nothing holds them; refuse damaged ones."""
    path = directory / STATS_FILE
    if not path.is_file():
        return []
    entries, text = read_header(path), read_metadata(path).get(STATS_KEY, "{}")
    modules = parse_object(text.encode(), f"the metadata of '{path}'").get("modules")
    layers = []
    for name, facts in modules.items() if isinstance(modules, dict) else ():
        letters = ("latent", "k_pe") if f"{name}.latent.amax" in entries else ("k", "v")
        k, v = (_read_tensor(path, entries, f"{name}.{letter}") for letter in letters)
        if k is None or v is None:
            return []
        try:
            module = ModuleFacts.model_validate(facts)
        except ValidationError as error:
            raise _damaged(path, f"{name[:80]}: {first_problem(error)}") from None
        layers.append(LayerPlaces(module.layer_idx, module.read, k, v))
    return layers


def _read_tensor(path: Path, entries: dict[str, Entry], name: str) -> TensorPlaces | None:
    fields = dict[str, Rows]()
    for field, columns in (("curve", BUCKETS), ("positions", POSITION_BUCKETS), ("amax", None)):
        entry = entries.get(f"{name}.{field}")
        if entry is None:
            return None
        if len(entry.shape) != 2 or not entry.size or entry.shape[1] != (columns or entry.shape[1]):
            raise _damaged(path, f"{name[:80]}.{field} is {[*entry.shape]}")
        values, step = read_values(path, entry), entry.shape[1]
        if not all(math.isfinite(x) and x >= 0 for x in values):
            raise _damaged(path, f"{name[:80]}.{field} is not finite, or below zero")
        fields[field] = [values[i : i + step] for i in range(0, len(values), step)]
    if len({tuple(map(max, rows)) for rows in fields.values()}) > 1:
        raise _damaged(path, f"curve, positions and amax of {name[:80]} have not the same largest")
    return TensorPlaces(fields["curve"], fields["positions"])


def _largest(rows: Rows) -> list[float]:
    """Return the largest of all heads in each bucket."""
    return [max(bucket) for bucket in zip(*rows, strict=True)]


def _damaged(path: Path, problem: str) -> InputError:
    return InputError(f"'{path}' is damaged ({problem}); calibrate again")
