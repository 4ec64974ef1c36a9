"""From a data recipe to the token ids of each sample, with a fingerprint of exactly those."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from calib.data.builtin import BUILTIN_PREFIX, builtin_rows, check_builtin
from calib.data.documents import LocatedRow
from calib.data.generated import GENERATED
from calib.data.hub_rows import find_split, stream_rows
from calib.data.local_rows import (
    READERS,
    Rows,
    check_path,
    looks_local,
    open_rows,
    unread_files,
)
from calib.data.pieces import Piece
from calib.data.tokens import tokenize_rows, unknown_ids
from calib.recipe import DataRecipe
from calib.scales.text_summary import TextSummary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NAMED = 6  # files in a warning


@dataclass(frozen=True)
class CalibrationData:
    """Everything the model will read, and where it came from."""

    pieces: list[Piece]
    source: str
    fingerprint: str  # sha256 of the token ids and of where samples begin
    warnings: tuple[str, ...] = ()
    unknown: frozenset[int] | None = None  # ids of what the tokenizer does not know
    words: tuple[int, int] | None = None  # of the documents, and the tokens that they became

    @cached_property
    def samples(self) -> list[list[int]]:
        """Token ids of each sample."""
        return [piece.ids for piece in self.pieces]

    @property
    def documents(self) -> int:
        """How many documents the samples are of."""
        return len({piece.document for piece in self.pieces})

    @property
    def unread(self) -> int:
        """Tokens of the documents that are in no sample."""
        if self.words is None:
            return 0
        return self.words[1] - sum(piece.tokens for piece in self.pieces)

    @property
    def line(self) -> str:
        """What was read and what was not."""
        return (
            f"documents: {self.documents:,}, samples: {len(self.pieces):,}; "
            f"{self.num_tokens:,} tokens read, {self.unread:,} left unread"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens in all samples together."""
        return sum(len(sample) for sample in self.samples)

    def summary(self, skip_first: int = 0) -> TextSummary:
        """Numbers of the tokens that count: those after the first `skip_first` of a sample."""
        return TextSummary.of(self.samples, skip_first, unknown=self.unknown, words=self.words)

    def only(self, samples: Iterable[int]) -> CalibrationData:
        """Those of the samples alone, in their order."""
        kept = [self.pieces[i] for i in sorted(samples)]
        return replace(self, pieces=kept, fingerprint=fingerprint([piece.ids for piece in kept]))


def load_data(
    recipe: DataRecipe,
    tokenizer: PreTrainedTokenizerBase,
    load_model: Callable[[], PreTrainedModel],
) -> CalibrationData:
    """Return up to `recipe.samples` samples of at most `recipe.seq_len` tokens; see `Pieces`.

    The same recipe, tokenizer and data give the same samples. `load_model` is called for the
    datasets 'self' and 'random' only, so that a bad dataset is found before weights are read.
    """
    if recipe.dataset in GENERATED:
        sample, warning = GENERATED[recipe.dataset]
        samples = sample(recipe, tokenizer, load_model())
        warnings = (warning, *_ignored(recipe, "config", "split", "column"))
        pieces = [Piece(i, len(ids), ids) for i, ids in enumerate(samples)]
        return CalibrationData(pieces, recipe.dataset, fingerprint(samples), warnings)
    source = open_source(recipe)
    pieces, warnings, words = tokenize_rows(source.rows, tokenizer, recipe)
    warnings, unknown = (*source.warnings, *warnings), unknown_ids(tokenizer)
    what = source.name, fingerprint([piece.ids for piece in pieces]), warnings
    return CalibrationData(pieces, *what, unknown or None, words)


def check_dataset(dataset: str) -> None:
    """Refuse, as far as its name tells, what is no dataset; nothing is read."""
    if dataset.startswith(BUILTIN_PREFIX):
        check_builtin(dataset)
    elif dataset not in GENERATED and looks_local(dataset):
        check_path(dataset)


def dataset_key(dataset: str) -> str:
    """What tells datasets apart: of a local one the path, links followed; of others the name."""
    local = dataset not in GENERATED and looks_local(dataset)
    return str(Path(dataset).expanduser().resolve()) if local else dataset


def fingerprint(samples: Sequence[Sequence[int]]) -> str:
    """Return the sha256 of all ids, each sample preceded by its length."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(struct.pack(f"<{len(sample) + 1}q", len(sample), *sample))
    return digest.hexdigest()


@dataclass(frozen=True)
class Source:
    """Rows in the order in which they are to be used."""

    name: str
    rows: Iterable[LocatedRow]
    warnings: tuple[str, ...] = ()


def open_source(recipe: DataRecipe) -> Source:
    """Find out what `recipe.dataset` names and open it; rows are read as they are used."""
    if recipe.dataset.startswith(BUILTIN_PREFIX):
        rows = _shuffled(builtin_rows(recipe.dataset, recipe.seq_len), recipe.seed)
        return Source(recipe.dataset, rows, _ignored(recipe, "config", "split", "column"))
    if looks_local(recipe.dataset):
        rows = _shuffled(open_rows(recipe.dataset), recipe.seed)
        warnings = *_ignored(recipe, "config", "split"), *_unread(recipe.dataset)
        return Source(recipe.dataset, rows, warnings)
    split = find_split(recipe)
    config = f" ({recipe.config})" if recipe.config else ""
    streamed = enumerate(stream_rows(recipe, split), 1)
    rows = ((f"row {number} as shuffled", row) for number, row in streamed)
    return Source(f"{recipe.dataset}{config} [{split}]", rows)


def _ignored(recipe: DataRecipe, *names: str) -> tuple[str, ...]:
    """Return a warning for each of the settings that was given but means nothing here."""
    return tuple(
        f"data.{name} '{value}' is ignored: dataset '{recipe.dataset}' has none"
        for name in names
        if (value := getattr(recipe, name)) is not None
    )


def _unread(dataset: str) -> tuple[str, ...]:
    names = unread_files(dataset)
    if not names:
        return ()
    shown = ", ".join([*names[:_NAMED], *(["..."] if len(names) > _NAMED else [])])
    return (
        f"dataset '{dataset}': not read are {shown} ({len(names)} in all); supported: "
        f"{', '.join(READERS)}, directly in it",
    )


def _shuffled(rows: Rows, seed: int) -> Iterator[LocatedRow]:
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    return (rows[i] for i in order)
