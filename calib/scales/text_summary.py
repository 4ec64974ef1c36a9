"""Numbers of the text that a calibration has read, which tell whether it can stand for any other.

They travel with the statistics, merge with those of other runs, and keep the text private: which
tokens occurred is known as bits, each of which many token ids share; `calib.scales.text_record`
says what is known of their order.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import pairwise, takewhile
from math import log
from typing import Any

from calib.errors import InputError
from calib.scales.text_record import TextRecord, join_records

LEAST_TOKENS, LEAST_DISTINCT = 64, 16  # fewer are refused
FEW_TOKENS = 1024  # from here on the growth of amax is looked at
FEW_DISTINCT = 32  # a thousand bytes of prose have more
FEW_UNREPEATED = 0.5  # share of the tokens that repeat no other sample
FEW_PER_WORD = 0.5  # tokens; tokenizers whose tokens span words need more than this
MUCH_UNKNOWN = 0.1  # share of the tokens

SKETCH_BITS = 2048


@dataclass(frozen=True)
class TextSummary:
    """What was read, in numbers; `tokens` are those that the statistics count."""

    samples: int
    tokens: int
    unrepeated_tokens: int  # without beginnings that an earlier sample has
    distinct_tokens: int  # of the vocabulary; of several runs an estimate
    unknown_tokens: int | None  # None: the tokenizer has no token for what it does not know
    words: int | None  # of all documents, before they were cut; None: there was no text
    word_tokens: int | None  # that those documents became
    sketch: int  # a bit for every `SKETCH_BITS`th token id or so
    records: tuple[TextRecord, ...] | None = None  # of each run; None: not known, as of old files

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
        missing = sum(each.count(i) for each in counted for i in unknown or ())
        return cls(
            samples=len(counted),
            tokens=tokens,
            unrepeated_tokens=tokens - _repeated(samples, skip_first),
            distinct_tokens=len(distinct),
            unknown_tokens=None if unknown is None else missing,
            words=words and words[0],
            word_tokens=words and words[1],
            sketch=_sketch(distinct),
            records=(TextRecord.of(read),) if read else (),
        )

    def join(self, other: "TextSummary") -> "TextSummary":
        """Add the numbers of another text; samples of the two are taken to differ."""
        sketch = self.sketch | other.sketch
        fewer, more = sorted((self, other), key=lambda text: text.distinct_tokens)
        added = min(_estimate(sketch) - _estimate(more.sketch), fewer.distinct_tokens)
        return TextSummary(
            self.samples + other.samples,
            self.tokens + other.tokens,
            self.unrepeated_tokens + other.unrepeated_tokens,
            more.distinct_tokens + max(0, added),
            _sum(self.unknown_tokens, other.unknown_tokens),
            _sum(self.words, other.words),
            _sum(self.word_tokens, other.word_tokens),
            sketch,
            join_records(self.records, other.records),
        )

    def to_json(self) -> dict[str, Any]:
        """All but the sketch and the records, for the report."""
        return {k: value for k, value in asdict(self).items() if k not in ("sketch", "records")}

    def warnings(self) -> list[str]:
        """Say why scales of this text may not hold others, one line each."""
        return [*_few(self.tokens), *self._doubts()]

    def check(self) -> None:
        """Refuse what is next to nothing; no tokens at all are for others to refuse."""
        enough = self.tokens >= LEAST_TOKENS and self.distinct_tokens >= LEAST_DISTINCT
        if enough or not self.tokens:
            return
        causes = self._causes()
        raise InputError(
            f"{self.tokens:,} tokens, {self.distinct_tokens:,} of them different, are too few to "
            f"calibrate on: {LEAST_TOKENS} and {LEAST_DISTINCT} are the least"
            f"{f' ({causes[0]})' if causes else ''}; use more text, or give --allow-few-tokens "
            "(data.allow_few_tokens of a recipe)"
        )

    def _doubts(self) -> list[str]:
        found = self._causes()
        if self.distinct_tokens < FEW_DISTINCT:
            found.insert(
                0,
                f"only {self.distinct_tokens:,} different tokens occur among the {self.tokens:,} "
                "that were read; use text with more of the vocabulary",
            )
        return found

    def _causes(self) -> list[str]:
        found = []
        if self.words and (self.word_tokens or 0) < FEW_PER_WORD * self.words:
            found.append(
                f"{self.words:,} words became {self.word_tokens:,} tokens; check that "
                "tokenizer_config.json names the class that tokenizer.json is for"
            )
        if self.unknown_tokens and self.unknown_tokens >= MUCH_UNKNOWN * self.tokens:
            found.append(
                f"{self.unknown_tokens / self.tokens:.0%} of the tokens are the unknown token; "
                "check that the tokenizer is this model's, and knows the text's language"
            )
        repeated = self.tokens - self.unrepeated_tokens
        if self.unrepeated_tokens < FEW_UNREPEATED * self.tokens:
            found.append(
                f"the {self.samples:,} samples are alike: {repeated:,} of {self.tokens:,} "
                "tokens repeat the beginning of another sample and add nothing"
            )
        return found


def text_warnings(text: TextSummary | None, tokens: int) -> list[str]:
    """Return the warnings of `text`, or what the number of `tokens` alone tells of an old run."""
    return _few(tokens) if text is None else text.warnings()


def _few(tokens: int) -> list[str]:
    if tokens >= FEW_TOKENS:
        return []
    return [
        f"only {tokens:,} tokens were read, too few to tell how large K and V become; calibrate "
        f"on {FEW_TOKENS:,} or more"
    ]


def _repeated(samples: Sequence[Sequence[int]], skip_first: int) -> int:
    """Count tokens that another sample has too, at the same place behind the same tokens."""
    # sorted, a sample shares its longest beginning with a neighbour
    ordered = sorted(samples, key=tuple)
    return sum(max(0, _shared(*pair) - skip_first) for pair in pairwise(ordered))


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens with which both begin."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


def _sketch(tokens: Collection[int]) -> int:
    bits = 0
    for token in tokens:
        digest = blake2b(str(token).encode(), digest_size=4).digest()
        bits |= 1 << int.from_bytes(digest, "big") % SKETCH_BITS
    return bits


def _estimate(sketch: int) -> int:
    """Estimate how many tokens set these bits (linear counting; Whang et al. 1990)."""
    free = max(1, SKETCH_BITS - sketch.bit_count())
    return round(SKETCH_BITS * log(SKETCH_BITS / free))


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None and other is None else (one or 0) + (other or 0)
