"""Numbers of calibration text, which tell whether it can stand for any other text.

They travel with the statistics and join those of other runs. They keep the text private: many token
ids share each bit of the set of tokens.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from math import log
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeInt, PlainSerializer, PositiveInt

from calib.errors import InputError
from calib.scales.text_records import TextRecord

LEAST_TOKENS, LEAST_DISTINCT = 64, 16  # fewer are refused
FEW_TOKENS = 1024  # from here on the growth of amax is looked at
FEW_DISTINCT = 32  # a thousand bytes of prose have more
FEW_UNREPEATED = 0.5  # share of the tokens that repeat no other sample
FEW_PER_WORD = 0.5  # tokens; tokenizers whose tokens span words need more than this
MUCH_UNKNOWN = 0.1  # share of the tokens
SKETCH_BITS = 2048
_SKETCH_DIGITS = SKETCH_BITS // 4
# fields of `TextSummary` that add up
_SUMS = ("samples", "tokens", "unrepeated_tokens", "unknown_tokens", "words", "word_tokens")


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
    # of each run; None: not known, as of old files
    records: Annotated[tuple[TextRecord, ...], Field(min_length=1)] | None = None

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
            shared = next((i for i in range(shortest) if one[i] != two[i]), shortest)
            repeated += max(0, shared - skip_first)
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
        is_recorded = self.records is not None and summary.records is not None
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
            records=(*(self.records or ()), *(summary.records or ())) if is_recorded else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return all but the sketch and the records, for the report."""
        return {k: value for k, value in asdict(self).items() if k not in ("sketch", "records")}

    def check(self) -> None:
        """Refuse too few tokens, or too few different ones; text without tokens is refused elsewhere."""
        is_enough = self.tokens >= LEAST_TOKENS and self.distinct_tokens >= LEAST_DISTINCT
        if is_enough or not self.tokens:
            return
        causes = self._causes()
        raise InputError(
            f"{self.tokens:,} tokens, {self.distinct_tokens:,} of them different, are too few to "
            f"calibrate on: {LEAST_TOKENS} and {LEAST_DISTINCT} are the least"
            f"{f' ({causes[0]})' if causes else ''}; use more text, or give --allow-few-tokens "
            "(data.allow_few_tokens of a recipe)"
        )

    def warnings(self) -> list[str]:
        """Return why scales of this text may not hold others, one line each."""
        lines = text_warnings(None, self.tokens)
        if self.distinct_tokens < FEW_DISTINCT:
            lines.append(
                f"only {self.distinct_tokens:,} different tokens occur among the {self.tokens:,} "
                "that were read; use text with more of the vocabulary"
            )
        return lines + self._causes()

    def _causes(self) -> list[str]:
        causes = []
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
        if self.unrepeated_tokens < FEW_UNREPEATED * self.tokens:
            causes.append(
                f"the {self.samples:,} samples are alike: {self.tokens - self.unrepeated_tokens:,} of "
                f"{self.tokens:,} tokens repeat the beginning of another sample and add nothing"
            )
        return causes


def text_warnings(text: TextSummary | None, tokens: int) -> list[str]:
    """Return the warnings of `text`, or of the number of `tokens` alone for an old run."""
    if text is not None:
        return text.warnings()
    if tokens >= FEW_TOKENS:
        return []
    return [
        f"only {tokens:,} tokens were read, too few to tell how large K and V become; calibrate "
        f"on {FEW_TOKENS:,} or more"
    ]


def _estimate(sketch: int) -> int:
    """Estimate how many tokens set these bits (linear counting; Whang et al. 1990)."""
    free = max(1, SKETCH_BITS - sketch.bit_count())
    return round(SKETCH_BITS * log(SKETCH_BITS / free))
