"""Calibration text: numbers that tell whether it can stand for any other text, and records of it.

Records tell whether another text was read. They are in `fp8kv_text.json`, in statistics and in the report
of a baked model. Numbers and records join those of other runs, and keep the text private: many token ids
share each bit of the set of tokens, and a record holds nothing but salted hashes of short runs of tokens.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PlainSerializer,
    PositiveInt,
    ValidationError,
    field_validator,
)

from calib.errors import InputError, first_problem
from calib.files.names import TEXT_FILE
from calib.files.strict_json import json_text, read_object

LEAST_TOKENS, LEAST_DISTINCT = 64, 16  # fewer are refused
FEW_TOKENS = 1024  # from here on the growth of amax is looked at
_MORE_TEXT = f"read {FEW_TOKENS:,} or more"
FEW_DISTINCT = 32  # a thousand bytes of prose have more
FEW_UNREPEATED = 0.5  # share of the tokens that repeat no other sample
FEW_PER_WORD = 0.5  # tokens; tokenizers whose tokens span words need more than this
MUCH_UNKNOWN = 0.1  # share of the tokens
SKETCH_BITS = 2048
_SKETCH_DIGITS = SKETCH_BITS // 4
# fields of `TextSummary` that add up
_SUMS = ("samples", "tokens", "unrepeated_tokens", "unknown_tokens", "words", "word_tokens")

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
    records: list[TextRecord | None]


def save_records(records: Records, directory: Path) -> None:
    """Write `records` if any text is known."""
    if any(records):
        (directory / TEXT_FILE).write_text(json_text(records_json(records)) + "\n")


def records_json(records: Sequence[TextRecord | None]) -> dict[str, Any]:
    """Return `records` as an object that `read_records` reads."""
    return {"records": [record and record.model_dump() for record in records]}


def read_records(file: Path) -> Records:
    """Read the records in a JSON file, as `save_records` or a bake writes it; refuse others."""
    try:
        return tuple(RecordsFile.model_validate(read_object(file)).records)
    except ValidationError as error:
        raise InputError(
            f"'{file}' is damaged ({first_problem(error)}); calibrate or convert again"
        ) from None


def _parse_sketch(text: object) -> int:
    if not isinstance(text, str) or not re.fullmatch(f"[0-9a-f]{{{_SKETCH_DIGITS}}}", text):
        raise ValueError(f"needs {_SKETCH_DIGITS} hexadecimal digits")
    return int(text, 16)


# the file of statistics holds hexadecimal digits
_Sketch = Annotated[
    int, BeforeValidator(_parse_sketch), PlainSerializer(lambda sketch: f"{sketch:0{_SKETCH_DIGITS}x}")
]


@dataclass(frozen=True)
class TextSummary:
    """Numbers of the tokens that the statistics count, and a record of the text."""

    samples: PositiveInt
    tokens: PositiveInt
    unrepeated_tokens: PositiveInt  # without beginnings that an earlier sample has
    distinct_tokens: PositiveInt  # of the vocabulary; of several runs an estimate
    unknown_tokens: NonNegativeInt | None  # None: the tokenizer has no token for what it does not know
    words: NonNegativeInt | None  # of all documents, before they were cut; None without text
    word_tokens: NonNegativeInt | None  # that those documents became
    sketch: _Sketch  # a bit for every `SKETCH_BITS`th token id or so
    records: Annotated[tuple[TextRecord, ...], Field(min_length=1)]  # of each run

    @classmethod
    def of(
        cls,
        samples: Sequence[Sequence[int]],
        skip_first: int = 0,
        *,
        unknown: Collection[int] | None = None,
        words: tuple[int, int] | None = None,
    ) -> "TextSummary":
        """Count `samples`, whose first `skip_first` tokens are read and not counted.

        `unknown` are the ids that stand for what the tokenizer does not know; `words` says how
        many words the documents have, and how many tokens they became before they were cut.
        """
        read = [sample for sample in samples if len(sample) > skip_first]
        counted = [sample[skip_first:] for sample in read]
        tokens, distinct = sum(map(len, counted)), set[int]().union(*counted)
        repeated = 0
        # sorted, a sample shares its longest beginning with a neighbour
        for one, two in pairwise(sorted(samples, key=tuple)):
            shortest = min(len(one), len(two))
            repeated += max(0, next((i for i in range(shortest) if one[i] != two[i]), shortest) - skip_first)
        sketch = 0
        for token in distinct:
            digest = blake2b(str(token).encode(), digest_size=4).digest()
            sketch |= 1 << int.from_bytes(digest, "big") % SKETCH_BITS
        return cls(
            samples=len(counted),
            tokens=tokens,
            unrepeated_tokens=tokens - repeated,
            distinct_tokens=len(distinct),
            unknown_tokens=None if unknown is None else sum(x.count(i) for x in counted for i in unknown),
            words=words and words[0],
            word_tokens=words and words[1],
            sketch=sketch,
            records=(TextRecord.of(read),) if read else (),
        )

    def join(self, summary: "TextSummary") -> "TextSummary":
        """Add the numbers of another text; samples of the two are taken to differ."""
        sketch = self.sketch | summary.sketch
        smaller, larger = sorted((self, summary), key=lambda text: text.distinct_tokens)
        added = min(_estimate(sketch) - _estimate(larger.sketch), smaller.distinct_tokens)
        pairs = {name: (getattr(self, name), getattr(summary, name)) for name in _SUMS}
        # a number that one text does not know is that of the other
        sums: dict[str, Any] = {
            x: sum(filter(None, pair)) for x, pair in pairs.items() if pair != (None, None)
        }
        return replace(
            self,
            **sums,
            distinct_tokens=larger.distinct_tokens + max(0, added),
            sketch=sketch,
            records=(*self.records, *summary.records),
        )

    def to_json(self) -> dict[str, Any]:
        """Return all but the sketch and the records, for the report."""
        return {k: value for k, value in asdict(self).items() if k not in ("sketch", "records")}

    def check(self) -> None:
        """Refuse too few tokens, or too few different ones; text without tokens is refused elsewhere."""
        is_enough = self.tokens >= LEAST_TOKENS and self.distinct_tokens >= LEAST_DISTINCT
        if is_enough or not self.tokens:
            return
        causes = self._causes("")
        raise InputError(
            f"{self.tokens:,} token{'' if self.tokens == 1 else 's'}, {self.distinct_tokens:,} of them "
            f"different, are too few to calibrate on: {LEAST_TOKENS} and {LEAST_DISTINCT} are the least"
            f"{f' ({causes[0]})' if causes else ''}; use more text, or give --allow-few-tokens "
            "(data.allow_few_tokens of a recipe)"
        )

    def warnings(self, advice: str = _MORE_TEXT) -> list[str]:
        """Return why scales of this text may not hold others, one line each; `advice` is on few tokens."""
        lines = _few_tokens(self.tokens, advice)
        if self.distinct_tokens < FEW_DISTINCT:
            lines.append(
                f"only {self.distinct_tokens:,} different tokens occur among the {self.tokens:,} "
                "that were read; use text with more of the vocabulary"
            )
        return lines + self._causes(advice)

    def _causes(self, advice: str) -> list[str]:
        causes, new = [], self.unrepeated_tokens
        is_few = bool(advice) and new < FEW_TOKENS <= self.tokens
        if self.words and (self.word_tokens or 0) < FEW_PER_WORD * self.words:
            causes.append(
                f"{self.words:,} words became {self.word_tokens:,} tokens; check that "
                "tokenizer_config.json names the class that tokenizer.json is for"
            )
        if self.unknown_tokens and self.unknown_tokens >= MUCH_UNKNOWN * self.tokens:
            causes.append(
                f"{self.unknown_tokens / self.tokens:.0%} of the tokens are the unknown token; "
                "check that the tokenizer is this model's, and knows the text's language"
            )
        if new < FEW_UNREPEATED * self.tokens:
            end = f"; {new:,} are new, too few: {advice}" if is_few else " and add nothing"
            causes.append(
                f"the {self.samples:,} samples are alike: {self.tokens - new:,} of "
                f"{self.tokens:,} tokens repeat the beginning of another sample{end}"
            )
        elif is_few:
            causes += _few_tokens(new, advice, "new ")
        return causes


def text_warnings(text: TextSummary | None, tokens: int) -> list[str]:
    """Return the warnings of `text`, or of the number of `tokens` alone where it is not known."""
    return text.warnings() if text else _few_tokens(tokens)


def _few_tokens(tokens: int, advice: str = _MORE_TEXT, kind: str = "") -> list[str]:
    line = f"only {tokens:,} {kind}tokens were read, too few to tell how large K and V become; {advice}"
    return [line] if tokens < FEW_TOKENS else []


def _estimate(sketch: int) -> int:
    """Estimate how many tokens set these bits (linear counting; Whang et al. 1990)."""
    return round(SKETCH_BITS * log(SKETCH_BITS / max(1, SKETCH_BITS - sketch.bit_count())))


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
