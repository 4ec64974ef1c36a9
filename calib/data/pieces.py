"""Cut long documents into samples, in an order of which every beginning is spread evenly."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

# a rest of a document that is shorter than this part of a sample is not read
LEAST_REST = 8


class Piece(NamedTuple):
    """Token ids of a sample, and what of its document they are."""

    document: int
    tokens: int  # of the document; an opening that stands in front of them again is not counted
    ids: list[int]


class Pieces:
    """Pieces of documents, at most so many.

    The first of every document come first, in the documents' order. Those of long documents follow,
    spread evenly over each; a document gives as many as its length is of all. With a larger
    `limit` the same pieces come first, so what one run has read another can leave out.
    """

    def __init__(self, limit: int, seq_len: int, opening: Sequence[int]) -> None:
        self._limit, self._seq_len = limit, seq_len
        self._opening = list(opening) if len(opening) < seq_len else []
        self.first: list[Piece] = []
        self._rest: list[tuple[float, Piece]] = []  # the least come first

    def add(self, ids: Sequence[int]) -> int:
        """Add the beginning of a document alone, and return the document's number."""
        beginning = list(ids[: self._seq_len])
        self.first.append(Piece(len(self.first), len(beginning), beginning))
        return self.first[-1].document

    def cut(self, document: int, ids: Sequence[int], turns: Sequence[int] = ()) -> None:
        """Cut all of a document; `turns` are tokens that begin one, and turns stay whole."""
        shared = len(self._opening)
        opening = self._opening if list(ids[:shared]) == self._opening else []
        spans = list(_spans(len(ids), self._seq_len, len(opening), turns))
        end = spans[0][1]
        self.first[document] = Piece(document, end, list(ids[:end]))
        wanted = self._limit - len(self.first)
        # one more than wanted, as one of them may come last
        for rank, at in enumerate(islice(_spread(len(spans)), 1, wanted + 2), 1):
            start, end = spans[at]
            piece = Piece(document, end - start, [*opening, *ids[start:end]])
            # last comes what `add` puts into a chat's beginning: another run may have read it so
            self._rest.append((rank / len(spans) + (start < self._seq_len), piece))
        if len(self._rest) > 2 * wanted:
            self._rest = sorted(self._rest)[:wanted]

    def all(self) -> list[Piece]:
        """All pieces, in their order."""
        rest = sorted(self._rest)[: self._limit - len(self.first)]
        return [*self.first, *(piece for _, piece in rest)]


def _spans(length: int, seq_len: int, opening: int, turns: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where consecutive pieces begin and end; a rest too short for one is left out."""
    start, end = 0, min(seq_len, length)
    while start < length and (not start or length - start >= seq_len // LEAST_REST):
        end = min(start + seq_len - (opening if start else 0), length)
        turn = bisect_right(turns, end) - 1
        if end < length and turn >= 0 and turns[turn] > start:
            following = turns[turn + 1] if turn + 1 < len(turns) else length
            if following - turns[turn] <= seq_len - opening:
                end = turns[turn]
        yield start, end
        start = end


def _spread(count: int) -> Iterator[int]:
    """Yield the numbers below `count` by their bits in reverse: halves, quarters, eighths, ..."""
    bits = (count - 1).bit_length()
    for number in range(1 << bits):
        at = int(f"{number:0{bits}b}"[::-1], 2)
        if at < count:
            yield at
