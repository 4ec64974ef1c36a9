"""Records of calibration text, which tell whether another text was read; and the files that hold them.

They keep the text private: a record holds nothing but salted hashes of short runs of tokens. Records
are in `fp8kv_text.json`, in statistics and in the report of a baked model.
"""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator

from calib.errors import InputError, first_problem
from calib.files.names import TEXT_FILE
from calib.files.strict_json import json_text, read_object

RUN_LENGTH = 16  # tokens: texts that were written apart share few of these
MAX_RUNS = 1 << 14  # in a record
READ = 0.25  # share of a text's runs; or twice that in its beginning, if samples were cut there
BEGINNING = 49  # runs: of 64 tokens, and of more where a record holds one run in several
_FEW_RUNS = 4  # too few to go by their share
_CHANCE = 128  # one in so many runs of any other text has a hash that a record holds
# a beginning is a system prompt if one sample in so many has it, and at least so many
_PROMPT_SHARE, _PROMPT_SAMPLES = 8, 3
_ESCAPE = 255
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]


class TextRecord(BaseModel):
    """Hashes of runs of tokens, which tell how much of another text one calibration has read.

    Runs begin anywhere: other lengths, another order or a copy of the file change nothing. Of a long
    text only one run in `one_in` is recorded.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    salt: int = Field(ge=0, lt=1 << 64)
    samples: PositiveInt
    tokens: PositiveInt
    one_in: int = Field(ge=1, lt=1 << 32)
    below: int = Field(ge=1, le=_CHANCE * MAX_RUNS)  # upper limit of the hashes
    runs: str = Field(max_length=4 * _CHANCE * MAX_RUNS // _ESCAPE)  # see `_pack`

    @field_validator("runs")
    @classmethod
    def _check_runs(cls, runs: str) -> str:
        b64decode(runs, validate=True)
        return runs

    @classmethod
    def of(cls, samples: Sequence[Sequence[int]]) -> "TextRecord":
        """Record `samples`, without beginnings that many of them share, as a system prompt is."""
        texts, digest = sorted({*map(tuple, samples)}), blake2b(digest_size=8)
        for text in texts:
            digest.update(np.array([len(text), *text], np.int64).tobytes())
        salt = int.from_bytes(digest.digest(), "big")
        # a text that only begins the next one is in that one
        whole = [text for text, after in pairwise([*texts, ()]) if after[: len(text)] != text]
        runs = [_hash_runs(text, salt) for text in whole]
        hashes = np.concatenate(runs)
        places = np.concatenate([np.arange(len(x), dtype=np.uint64) for x in runs])
        _, inverse, counts = np.unique(_mix(hashes ^ places), return_inverse=True, return_counts=True)
        is_prompt = counts[inverse] >= max(_PROMPT_SAMPLES, len(whole) // _PROMPT_SHARE)
        hashes, one_in = np.unique(hashes[~is_prompt]), 1
        while len(hashes) > MAX_RUNS:
            one_in *= 2
            hashes = hashes[hashes % np.uint64(one_in) == 0]
        below = _CHANCE * max(1, len(hashes))
        packed, tokens = _pack(np.unique(_shorten(hashes, below))), sum(map(len, samples))
        return cls(salt=salt, samples=len(samples), tokens=tokens, one_in=one_in, below=below, runs=packed)

    def has_read(self, text: Sequence[int]) -> bool | None:
        """Return whether a notable part of `text` was read; None if it is too short to tell."""
        hashes = _hash_runs(text, self.salt)
        places = np.flatnonzero(hashes % np.uint64(self.one_in) == 0)
        if not len(places):
            return None
        is_read = np.isin(_shorten(hashes[places], self.below), self._hashes)
        if is_read.sum() >= max(min(len(is_read), 2), READ * len(is_read)):
            return True
        if len(text) < RUN_LENGTH:
            return None  # it may be the end of a longer one
        beginning = is_read[places < BEGINNING * max(1, self.one_in // 4)]  # a dozen or more
        return len(beginning) >= _FEW_RUNS and bool(beginning.mean() >= 2 * READ)

    @cached_property
    def _hashes(self) -> Hashes:
        data = np.frombuffer(b64decode(self.runs), np.uint8)
        return np.cumsum(data, dtype=np.uint64)[data < _ESCAPE]


Records = tuple[TextRecord | None, ...]  # None: of text that is not known


class RecordsFile(BaseModel):
    """The part of a JSON file that records text."""

    model_config = ConfigDict(strict=True)
    records: list[TextRecord | None] = [None]


def save_records(records: Records, directory: Path) -> None:
    """Write `records` if any text is known."""
    if any(records):
        (directory / TEXT_FILE).write_text(json_text(records_json(records)) + "\n")


def records_json(records: Sequence[TextRecord | None]) -> dict[str, Any]:
    """Return `records` as an object that `read_records` reads."""
    return {"records": [record and record.model_dump() for record in records]}


def read_records(file: Path) -> Records:
    """Read the records in a JSON file, as `save_records` or a bake writes it."""
    try:
        return tuple(RecordsFile.model_validate(read_object(file)).records)
    except ValidationError as error:
        raise InputError(
            f"'{file}' is damaged ({first_problem(error)}); calibrate or convert again"
        ) from None


def _hash_runs(tokens: Sequence[int], salt: int) -> Hashes:
    """Hash each run of `RUN_LENGTH` tokens, or all of them where there are fewer."""
    ids = _mix(np.array(tokens, np.int64).astype(np.uint64) ^ np.uint64(salt))
    length = min(RUN_LENGTH, len(ids))
    total = np.zeros(len(ids) - length + 1, np.uint64)
    for offset in range(length):
        total = total * _FACTOR + ids[offset : offset + len(total)]
    return _mix(total)


def _mix(x: Hashes) -> Hashes:
    """Make every bit depend on all of the value's (the finaliser of SplitMix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    mixed: Hashes = x ^ (x >> np.uint64(31))
    return mixed


def _shorten(hashes: Hashes, below: int) -> Hashes:
    """Take the upper bits, as the lower ones choose which runs are recorded."""
    upper: Hashes = (hashes >> np.uint64(32)) % np.uint64(below)
    return upper


def _pack(hashes: Hashes) -> str:
    """Write the gaps between sorted `hashes` in base64, a byte each; 255 adds to the next."""
    escapes, rests = np.divmod(np.diff(hashes, prepend=np.uint64(0)), np.uint64(_ESCAPE))
    ends = np.cumsum(escapes + np.uint64(1)).astype(np.int64)
    data = np.full(int(ends[-1]) if len(ends) else 0, _ESCAPE, np.uint8)
    data[ends - 1] = rests
    return b64encode(data.tobytes()).decode()
