"""A record of the text that a calibration has read, to tell how much of another text it knows.

Kept are salted hashes of runs of tokens, wherever these begin: other lengths, another order or a
copy of the file change nothing. Of a long text only one run in `one_in` is kept, and hashes are so
short that one in `_CHANCE` runs of any other text has a hash that is there too.
"""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator

Hashes = NDArray[np.uint64]

RUN = 16  # tokens: texts that were written apart share few of these
MOST_RUNS = 1 << 14  # that are kept
READ = 0.25  # of a text's runs; or half of those in its beginning, if samples were cut there
BEGINNING = 49  # runs: of 64 tokens, and of more where not all are kept
_FEW = 4  # runs that are too few to go by their share
_CHANCE = 128
# a beginning is a system prompt if one sample in so many has it, and at least so many
_PROMPT_SHARE, _PROMPT_SAMPLES = 8, 3
_ESCAPE = 255
_FACTOR = 0x9E3779B97F4A7C15


class TextRecord(BaseModel):
    """What one calibration has read."""

    model_config = ConfigDict(strict=True, frozen=True)
    salt: int = Field(ge=0, lt=1 << 64)
    samples: int = Field(ge=1)
    tokens: int = Field(ge=1)
    one_in: int = Field(ge=1, lt=1 << 32)
    below: int = Field(ge=1, le=_CHANCE * MOST_RUNS)  # every hash
    runs: str = Field(max_length=4 * _CHANCE * MOST_RUNS // _ESCAPE)  # see `_packed`

    @field_validator("runs")
    @classmethod
    def _can_be_read(cls, runs: str) -> str:
        b64decode(runs, validate=True)
        return runs

    @classmethod
    def of(cls, samples: Sequence[Sequence[int]]) -> "TextRecord":
        """Record `samples`, without beginnings that many of them share, as a system prompt is."""
        texts, digest = sorted({*map(tuple, samples)}), blake2b(digest_size=8)
        for text in texts:
            digest.update(np.array([len(text), *text], np.int64).tobytes())
        salt = int.from_bytes(digest.digest(), "big")
        # what only begins the next text is in that text
        whole = [one for one, more in zip(texts, [*texts[1:], ()], strict=True) if more[: len(one)] != one]
        runs = [_hashes(text, salt) for text in whole]
        hashes, places = np.concatenate(runs), np.concatenate([np.arange(len(x)) for x in runs])
        counts = _counts(_mixed(hashes ^ places.astype(np.uint64)))
        hashes = np.unique(hashes[counts < max(_PROMPT_SAMPLES, len(whole) // _PROMPT_SHARE)])
        one_in = 1
        while (chosen := hashes % np.uint64(one_in) == 0).sum() > MOST_RUNS:
            one_in *= 2
        below = _CHANCE * max(1, int(chosen.sum()))
        return cls(
            salt=salt, samples=len(samples), tokens=sum(map(len, samples)), one_in=one_in,
            below=below, runs=_packed(np.unique(_shortened(hashes[chosen], below))),
        )  # fmt: skip

    def has_read(self, text: Sequence[int]) -> bool | None:
        """Whether a notable part of `text` was read; None: it is too short to tell."""
        hashes = _hashes(text, self.salt)
        places = np.flatnonzero(hashes % np.uint64(self.one_in) == 0)
        if not len(places):
            return None
        known = np.isin(_shortened(hashes[places], self.below), self._values)
        if known.sum() >= max(min(len(known), 2), READ * len(known)):
            return True
        if len(text) < RUN:
            return None  # it may be the end of a longer one
        first = known[places < BEGINNING * max(1, self.one_in // 4)]  # a dozen or more
        return len(first) >= _FEW and bool(first.mean() >= 2 * READ)

    @cached_property
    def _values(self) -> Hashes:
        data = np.frombuffer(b64decode(self.runs), np.uint8)
        return np.cumsum(data, dtype=np.uint64)[data < _ESCAPE]


def join_records(
    one: tuple[TextRecord, ...] | None, other: tuple[TextRecord, ...] | None
) -> tuple[TextRecord, ...] | None:
    """Put records together; None, as of files that have none, stays unknown."""
    return None if one is None or other is None else (*one, *other)


def _counts(values: Hashes) -> NDArray[np.int64]:
    """Count how often each of `values` is among them."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return counts[which]


def _hashes(tokens: Sequence[int], salt: int) -> Hashes:
    """Hash each run of `RUN` tokens, or all of them where there are fewer."""
    ids = _mixed(np.array(tokens, np.int64).astype(np.uint64) ^ np.uint64(salt))
    length = min(RUN, len(ids))
    total = np.zeros(len(ids) - length + 1, np.uint64)
    for offset in range(length):
        total = total * np.uint64(_FACTOR) + ids[offset : offset + len(total)]
    return _mixed(total)


def _mixed(x: Hashes) -> Hashes:
    """Make every bit depend on all of the value's (the finaliser of SplitMix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    mixed: Hashes = x ^ (x >> np.uint64(31))
    return mixed


def _shortened(hashes: Hashes, below: int) -> Hashes:
    """Take the upper bits, as the lower ones have chosen which are kept."""
    upper: Hashes = (hashes >> np.uint64(32)) % np.uint64(below)
    return upper


def _packed(values: Hashes) -> str:
    """Write the gaps between sorted `values`, a byte each; 255 adds to the next."""
    escapes, rest = np.divmod(np.diff(values, prepend=np.uint64(0)), np.uint64(_ESCAPE))
    ends = np.cumsum(escapes + np.uint64(1)).astype(np.int64) - 1
    data = np.full(int(ends[-1]) + 1 if len(ends) else 0, _ESCAPE, np.uint8)
    data[ends] = rest
    return b64encode(data.tobytes()).decode()
