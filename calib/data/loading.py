"""From a data recipe to the token ids of each sample, with a fingerprint of exactly those."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch.utils.data import ConcatDataset

from calib.arguments import to_path
from calib.data.batches import Batch, make_batches
from calib.data.builtin import BUILTIN_PREFIX, MORE_PICTURES, PICTURES, builtin_rows, check_builtin
from calib.data.generated import GENERATED
from calib.data.hub_rows import find_split, stream_rows
from calib.data.local_rows import READERS, find_files, looks_local, open_rows
from calib.data.media import MediaReader
from calib.data.samples import LocatedRow, Piece, has_media, tokenize_rows, unknown_ids
from calib.errors import InputError
from calib.models.config import takes_media
from calib.recipe import DataRecipe
from calib.scales.text_summary import TextSummary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MAX_FILE_NAMES = 6  # in a warning
_FIRST_ROWS = 64  # in which a dataset with pictures or sound has one
# of what a processor reads, in the order of MODALITIES
MEDIA_COUNTS = {"pictures": "picture_tokens", "audio": "audio_tokens"}


@dataclass(frozen=True)
class CalibrationData:
    """Everything the model will read, and where it came from."""

    pieces: list[Piece]
    source: str
    warnings: tuple[str, ...] = ()
    unknown: frozenset[int] | None = None  # ids of what the tokenizer does not know
    words: tuple[int, int] | None = None  # of the documents, and the tokens that they became
    columns: Mapping[str, str] = field(default_factory=dict)  # that were read, each as `text` or `chats`
    places: Sequence[str] = ()  # of the documents, such as "a.jsonl, line 3"; none where not known

    @cached_property
    def samples(self) -> list[list[int]]:
        """Token ids of each sample."""
        return [piece.ids for piece in self.pieces]

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of all token ids, each sample preceded by its length, and of what pictures became."""
        digest = hashlib.sha256()
        for _, _, sample, pictures in self.pieces:
            digest.update(struct.pack(f"<{len(sample) + 1}q", len(sample), *sample))
            digest.update(pictures.digest if pictures else b"")
        return digest.hexdigest()

    @property
    def documents(self) -> int:
        """Number of documents in the samples."""
        return len({piece.document for piece in self.pieces})

    @property
    def unread(self) -> int:
        """Number of tokens of the documents that are in no sample."""
        return self.words[1] - sum(piece.tokens for piece in self.pieces) if self.words else 0

    @property
    def media(self) -> dict[str, int]:
        """Numbers of pictures and sounds, and of their tokens; empty if no processor has read the data."""
        samples, counts = [piece.media for piece in self.pieces if piece.media], dict[str, int]()
        for number, (name, tokens) in enumerate(MEDIA_COUNTS.items(), 1):
            counts[name] = sum(x.counts[number - 1] for x in samples)
            counts[tokens] = sum(int((x.modalities == number).sum()) for x in samples)
        return {name: count for name, count in counts.items() if count}

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all samples together."""
        return sum(map(len, self.samples))

    @property
    def line(self) -> str:
        """Numbers of documents, samples and tokens, for a terminal."""
        media, names = self.media, MEDIA_COUNTS.items()
        columns = ", ".join(f"{name} ({kind})" for name, kind in self.columns.items())
        read = f"; columns read: {columns}" if columns else ""
        parts = [f"; {x}: {media[x]:,}, {media[y]:,} of the tokens" for x, y in names if x in media]
        if parts:
            text = self.num_tokens - sum(media.get(y, 0) for _, y in names)
            parts.append(f"; text: {text:,} of the tokens")
        return (
            f"documents: {self.documents:,}, samples: {len(self.pieces):,}; "
            f"{self.num_tokens:,} tokens read, {self.unread:,} left unread"
            f"{read}{''.join(parts)}"
        )

    def summary(self, skip_first: int = 0) -> TextSummary:
        """Return numbers of the text, without pictures, behind the first `skip_first` tokens of a sample."""
        text = [x.text(ids, skip_first) if x else ids for *_, ids, x in self.pieces]
        summary = TextSummary.of(text, skip_first, unknown=self.unknown, words=self.words)
        return replace(summary, unrepeated_tokens=summary.tokens) if self.media else summary

    def batches(self, size: int, recipe: DataRecipe) -> list[Batch]:
        """Return batches of `size` samples: of one, with its pictures, if a processor has read the data."""
        batches = make_batches(self.samples, size, pad_id=0, seed=recipe.seed, skip_first=recipe.skip_first)
        media = [self.pieces[batch.sample_ids[0]].media for batch in batches]
        places = {i: self.places[piece.document] for i, piece in enumerate(self.pieces) if self.places}
        return [replace(batch, media=x, places=places) for batch, x in zip(batches, media, strict=True)]

    def only(self, samples: Iterable[int]) -> CalibrationData:
        """Return the samples of these indices alone, in their order."""
        return replace(self, pieces=[self.pieces[i] for i in sorted(samples)])


def load_data(
    recipe: DataRecipe,
    tokenizer: PreTrainedTokenizerBase,
    load_model: Callable[[], PreTrainedModel],
    reader: MediaReader | None = None,
) -> CalibrationData:
    """Return up to `recipe.samples` samples of at most `recipe.seq_len` tokens; see `Pieces`.

    The same recipe, tokenizer and data give the same samples. `load_model` is called for the
    datasets 'self' and 'random' only, so that a bad dataset is found before weights are read. Pictures are
    read with `reader`, where the recipe or one of the first rows names any; without it, text alone is.
    Raises an InputError for a dataset that gives no such samples.
    """
    has_pictures = bool(recipe.images or recipe.audio) or recipe.dataset in (PICTURES, MORE_PICTURES)
    reader = reader if reader and takes_media(reader.checkpoint.config) else None
    if has_pictures and (reader is None or recipe.dataset in GENERATED):
        reason = "this dataset has none" if reader else "this model takes none"
        raise InputError(
            f"pictures and sound were asked for, and {reason}: choose a dataset of text, without --images "
            "and --audio"
        )
    if recipe.dataset in GENERATED:
        sample, warning = GENERATED[recipe.dataset]
        samples = sample(recipe, tokenizer, load_model())
        pieces = [Piece(i, len(ids), ids) for i, ids in enumerate(samples)]
        warnings = (warning, *_unused(recipe, "config", "split", "column"))
        return CalibrationData(pieces, recipe.dataset, warnings)
    if reader and has_pictures:
        _ = reader.processor  # refused, where it cannot be, before pictures are drawn or downloaded
    source = open_source(recipe)
    first = [*islice(rows := iter(source.rows), min(_FIRST_ROWS, recipe.samples) if reader else 0)]
    if reader and (has_pictures or any(has_media(row) for _, row in first)):
        unknown, tokenized = None, reader.read(chain(first, rows), recipe, source.folder)
    else:
        unknown, tokenized = unknown_ids(tokenizer), tokenize_rows(chain(first, rows), tokenizer, recipe)
    pieces, warnings, words, columns, places = tokenized
    warnings = source.warnings + warnings
    return CalibrationData(pieces, source.name, warnings, unknown or None, words, columns, places)


class RowSource(NamedTuple):
    """A dataset's name, and its rows in the order of their use."""

    name: str
    rows: Iterable[LocatedRow]
    warnings: tuple[str, ...] = ()
    folder: Path | None = None  # of local files, to which paths in them are relative


def open_source(recipe: DataRecipe) -> RowSource:
    """Open the dataset of `recipe`: built-in, local, or on the Hub. Rows are read as they are used."""
    dataset = recipe.dataset
    if dataset.startswith(BUILTIN_PREFIX):
        rows = _shuffled(builtin_rows(dataset, recipe.seq_len), recipe.seed)
        return RowSource(dataset, rows, _unused(recipe, "config", "split", "column"))
    if looks_local(dataset):
        rows, warnings = _shuffled(open_rows(dataset), recipe.seed), _unused(recipe, "config", "split")
        path = to_path(dataset)
        if (names := find_files(dataset)[1]) and recipe.images is None:
            shown = ", ".join([*names[:_MAX_FILE_NAMES], "..."] if len(names) > _MAX_FILE_NAMES else names)
            warning = f"dataset '{dataset}': not read are {shown} ({len(names)} in all)"
            warnings = (*warnings, f"{warning}; supported: {', '.join(READERS)}, directly in it")
        return RowSource(dataset, rows, warnings, path if path.is_dir() else path.parent)
    split = find_split(recipe)
    config = f" ({recipe.config})" if recipe.config else ""
    rows = ((f"row {number} as shuffled", row) for number, row in enumerate(stream_rows(recipe, split), 1))
    return RowSource(f"{dataset}{config} [{split}]", rows)


def check_dataset(dataset: str) -> None:
    """Refuse what is not a dataset, as far as its name tells; nothing is read."""
    if dataset.startswith(BUILTIN_PREFIX):
        check_builtin(dataset)
    elif dataset not in GENERATED and looks_local(dataset):
        find_files(dataset)


def dataset_key(dataset: str) -> str:
    """Return what two names of one dataset share: the path of local files, links followed."""
    return str(to_path(dataset).resolve()) if dataset not in GENERATED and looks_local(dataset) else dataset


def _unused(recipe: DataRecipe, *names: str) -> tuple[str, ...]:
    """Return a warning for each setting that is set and means nothing for this dataset."""
    return tuple(
        f"data.{name} '{value}' is ignored: dataset '{recipe.dataset}' has none"
        for name in names
        if (value := getattr(recipe, name)) is not None
    )


def _shuffled(rows: list[LocatedRow] | ConcatDataset[LocatedRow], seed: int) -> Iterator[LocatedRow]:
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    return (rows[i] for i in order)
