"""Rows with pictures or sound to samples, made by the model's own processor as a served request is.

A sample is a batch of its own: processors pad text on one side and pictures each in their own way, and one
sample needs no padding. Pixels are made again when the model reads them, so that none stay in memory.
"""

from __future__ import annotations

import hashlib
import re
import wave
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calib.data.samples import (
    MAX_REFUSALS,
    Document,
    LocatedRow,
    MediaSample,
    Piece,
    Row,
    TemplateRefusal,
    Tokenized,
    UnusableRow,
    apply_template,
    count_words,
    find_document,
    row_warnings,
)
from calib.errors import InputError, one_line
from calib.files.model_directory import ModelDirectory
from calib.models.config import media_token_id, model_positions, takes_media
from calib.models.load import load_processor
from calib.recipe import DataRecipe

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig, ProcessorMixin

# types of parts of a message, in the order of MODALITIES: their columns, and the part of a processor
_KINDS = {
    "image": (("images", "image"), "image_processor"),
    "audio": (("audio", "audios"), "feature_extractor"),
}
_NAMES = {"image": "picture", "audio": "sound"}
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # of a processor; 0 stands for text
# what processors raise for text and pictures that do not fit each other
_REFUSALS = (ValueError, TypeError, LookupError, RuntimeError, AttributeError, OSError, EOFError)


class Request(NamedTuple):
    """A prompt with the pictures and sounds in it, of each kind in their order."""

    text: str
    media: dict[str, list[Any]]
    is_chat: bool


@dataclass(frozen=True)
class MediaReader:
    """A processor, and what the model's config says of the tokens that it makes."""

    processor: ProcessorMixin
    token_ids: dict[str, int | None]  # by kind; None: a processor may mark the positions of pictures
    max_tokens: int | None  # positions of the model

    @classmethod
    def loader(
        cls, checkpoint: ModelDirectory, config: PreTrainedConfig, trust_code: bool
    ) -> Callable[[], MediaReader] | None:
        """Return a function that loads the model's processor, once; None for a model of text alone."""

        @cache
        def load() -> MediaReader:
            ids = {kind: media_token_id(config, kind) for kind in _KINDS}
            return cls(load_processor(checkpoint, trust_code), ids, model_positions(config))

        return load if takes_media(checkpoint.config) else None

    def read(self, rows: Iterable[LocatedRow], recipe: DataRecipe, folder: Path | None) -> Tokenized:
        """Make samples of rows until there are `recipe.samples`; paths in them are relative to `folder`.

        Text behind the last picture or sound is cut at `recipe.seq_len`; these are never cut.
        """
        pieces: list[Piece] = []
        columns: dict[Any, None] = {}  # of all rows
        refusals: list[str] = []
        unusable: list[str] = []
        words = tokens = 0
        for where, row in rows:
            columns |= dict.fromkeys(row if isinstance(row, Mapping) else ())
            try:
                document = find_document(row, recipe.column, media=True)
                request = self.request(document, row, {"image": recipe.images, "audio": recipe.audio})
                count, ids, sample = self._sample(request, folder, recipe.seq_len)
            except TemplateRefusal as error:
                refusals.append(str(error))
            except UnusableRow as error:
                unusable.append(f"{where}: {error}")
            else:
                pieces.append(Piece(len(pieces), len(ids), ids, sample))
                words, tokens = words + count_words(document), tokens + count
            is_hopeless = not pieces and len(refusals) + len(unusable) == MAX_REFUSALS
            if len(pieces) == recipe.samples or is_hopeless:
                break
        if not any(any(piece.media.counts) for piece in pieces if piece.media):
            for name in {recipe.images, recipe.audio} - {*columns, None}:
                raise InputError(
                    f"no column '{name}' in dataset '{recipe.dataset}'; columns: {', '.join(columns)}"
                )
            reason = next(iter([*unusable, *refusals]), "no row has one")
            raise InputError(f"no picture or sound of dataset '{recipe.dataset}' can be read: {reason}")
        return Tokenized(pieces, row_warnings(recipe, len(pieces), refusals, unusable), (words, tokens))

    def request(self, document: Document, row: Row, columns: Mapping[str, str | None]) -> Request:
        """Write the prompt of a row: a chat by the processor's template, and text with places as it is.

        Pictures and sounds without a place come first. An UnusableRow if these and places differ in number.
        """
        tokens = {x: str(getattr(self.processor, f"{x}_token", None) or f"<{x}>") for x in _KINDS}
        places = {x: tokens[x] for x, (_, part) in _KINDS.items() if getattr(self.processor, part, None)}
        question = {"role": "user", "content": document}
        chat: list[dict[str, Any]] = document if isinstance(document, list) else [question]
        contents = [_parts(message.get("content"), places) for message in chat]
        first = next((i for i, message in enumerate(chat) if message.get("role") == "user"), 0)
        has_places, media = any("text" not in part for parts in contents for part in parts), {}
        for kind, column in columns.items():
            values = _values(row, kind, column) if column is not None or kind in places else []
            media[kind] = _fill(contents, first, kind, values)
            if column is not None and not media[kind]:
                raise UnusableRow(f"it has no {_NAMES[kind]} in column '{column}'")
        has_template = bool(getattr(self.processor, "chat_template", None))
        if isinstance(document, str) and (has_places or not has_template):
            end = "" if has_places else "\n"  # models tell pictures apart by what is between
            text = "".join(x["text"] if "text" in x else tokens[x["type"]] + end for x in contents[0])
            return Request(text, media, is_chat=False)
        if not has_template:
            raise InputError(
                "the dataset holds chats but the processor has no chat template; use a dataset with a text "
                "column (`--set data.column=NAME`)"
            )
        written = [message | {"content": content} for message, content in zip(chat, contents, strict=True)]
        return Request(apply_template(written, self.processor), media, is_chat=True)

    def _sample(
        self, request: Request, folder: Path | None, seq_len: int
    ) -> tuple[int, list[int], MediaSample]:
        """Return the number of tokens of a request, those that are read, and its pictures and sounds."""
        outputs = self._process(request, folder)
        ids = outputs["input_ids"][0]
        modalities = self._modalities(outputs, request)
        places = modalities.nonzero()
        last = int(places.max()) + 1 if len(places) else 0
        length = max(min(seq_len, len(ids)), last)
        if self.max_tokens and length > self.max_tokens:
            raise UnusableRow(
                f"its media reach to token {last:,}, and the model has {self.max_tokens:,} positions"
            )
        digest = hashlib.sha256()
        for name, x in sorted(self._arguments(outputs, length).items()):
            digest.update(f"{name} {x.dtype} {[*x.shape]}".encode() + x.contiguous().numpy().tobytes())

        def arguments() -> dict[str, Tensor]:
            return self._arguments(self._process(request, folder), length)

        counts = tuple(map(len, request.media.values()))
        sample = MediaSample(counts, modalities[:length], digest.digest(), arguments)
        return len(ids), ids[:length].tolist(), sample

    def _process(self, request: Request, folder: Path | None) -> dict[str, Tensor]:
        pictures, sounds = request.media.values()
        for kind, (_, part) in _KINDS.items():
            if request.media[kind] and getattr(self.processor, part, None) is None:
                raise UnusableRow(f"the model's processor takes no {_NAMES[kind]}")
        media: dict[str, Any] = {"images": [[open_picture(x, folder) for x in pictures]]} if pictures else {}
        if sounds:
            rate = self.processor.feature_extractor.sampling_rate
            media |= {"audio": [open_sound(x, folder, rate) for x in sounds], "sampling_rate": rate}
        try:
            special = {"add_special_tokens": not request.is_chat}
            outputs = self.processor(text=[request.text], return_tensors="pt", **media, **special)
        except _REFUSALS as error:
            raise UnusableRow(f"the model's processor refuses it ({one_line(error)})") from error
        if not all(isinstance(x, Tensor) for x in outputs.values()):
            raise InputError("the model's processor makes inputs that are not tensors; calibrate it on text")
        return dict(outputs)

    def _arguments(self, outputs: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        """Return the model's arguments but token ids and mask; what is [1, T] ends with the sample."""
        shape = outputs["input_ids"].shape
        names = outputs.keys() - {"input_ids", "attention_mask"}
        return {x: outputs[x][:, :length] if outputs[x].shape == shape else outputs[x] for x in names}

    def _modalities(self, outputs: dict[str, Tensor], request: Request) -> Tensor:
        ids = outputs["input_ids"][0]
        modalities = torch.zeros_like(ids)
        for number, (kind, token_id) in enumerate(self.token_ids.items(), 1):
            marked = [outputs[x][0] for x in _TOKEN_TYPES if kind == "image" and x in outputs]
            is_it = ids == token_id if token_id is not None else marked[0] != 0 if marked else ids < 0
            modalities[is_it] = number
            if request.media[kind] and token_id is None and not marked:
                raise InputError(
                    f"neither the model's config nor its {type(self.processor).__name__} says which tokens "
                    f"stand for a {_NAMES[kind]}; calibrate it on text"
                )
            if request.media[kind] and not is_it.any():
                raise UnusableRow(f"the processor's chat template left its {_NAMES[kind]} out")
        return modalities


def open_picture(value: Any, folder: Path | None) -> Image:
    """Open a picture: bytes, a path, a data URL, an image of PIL, or the record of a column of images."""
    from PIL import Image

    with _opening(value, folder, "picture", SyntaxError, Image.DecompressionBombError) as source:
        return (source if isinstance(source, Image.Image) else Image.open(source)).convert("RGB")


def open_sound(value: Any, folder: Path | None, rate: int) -> NDArray[np.float32]:
    """Read a WAV file, given as pictures are, or an array with its rate; one channel at `rate` a second."""
    with _opening(value, folder, "sound", wave.Error) as source:
        if isinstance(source, Mapping):
            channels, own = np.asarray(source["array"], np.float64), source["sampling_rate"]
        else:
            with wave.open(str(source) if isinstance(source, Path) else source) as file:
                own, frames = file.getframerate(), file.readframes(file.getnframes())
                raw = np.frombuffer(frames, np.uint8).reshape(-1, file.getnchannels(), file.getsampwidth())
            wide = np.zeros((*raw.shape[:2], 4), np.uint8)
            wide[..., -raw.shape[2] :] = raw ^ 128 if raw.shape[2] == 1 else raw  # 8 bits have no sign
            channels = wide.view("<i4")[..., 0].T / 2**31
        samples: NDArray[np.float64] = np.atleast_2d(channels).mean(0)
        count = round(len(samples) * rate / own)
        if own != rate:  # by their spectrum, whose upper end is cut or empty
            samples = np.fft.irfft(np.fft.rfft(samples)[: count // 2 + 1], count) * (count / len(samples))
        return samples.astype(np.float32)


@contextmanager
def _opening(value: Any, folder: Path | None, name: str, *errors: Any) -> Iterator[Any]:
    """Yield where to read `value` from; an UnusableRow for what goes wrong in the block."""
    record = value if isinstance(value, Mapping) else {}
    source = record.get("bytes") or record.get("data") or record.get("path") or value
    shown = f"'{source:.80}'" if isinstance(source, str) else f"of {type(source).__name__}"
    try:
        if isinstance(source, str) and source.startswith(("http://", "https://")):
            raise ValueError("it is an address: download it, and give its path")
        if isinstance(source, str):
            _, mark, data = source.rpartition(";base64,")
            is_data = mark or "data" in record
            source = b64decode(data, validate=True) if is_data else (folder or Path()) / source
        yield BytesIO(source) if isinstance(source, bytes) else source
    except (*_REFUSALS, *errors) as error:
        reason = getattr(error, "strerror", None) or one_line(error) or type(error).__name__
        raise UnusableRow(f"its {name} {shown} cannot be read ({reason})") from error


def _values(row: Row, kind: str, column: str | None) -> list[Any]:
    """Return the pictures or sounds in `column` of `row`, by default in one of a usual name."""
    columns = row if isinstance(row, Mapping) else {}
    name = column or next((x for x in _KINDS[kind][0] if x in columns), "")
    value = columns.get(name)
    return [x for x in (value if isinstance(value, list) else [value]) if x is not None]


def _parts(content: Any, tokens: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the parts of a message; what stands for a picture or sound in its text is one of them."""
    places = {**{f"<{kind}>": kind for kind in tokens}, **{token: kind for kind, token in tokens.items()}}
    parts: list[dict[str, Any]] = []
    for part in [{"type": "text", "text": content or ""}] if not isinstance(content, list) else content:
        if "text" not in part:
            parts.append(part)
            continue
        for text in re.split(f"({'|'.join(map(re.escape, places))})", part["text"]):
            if text in places:
                parts.append({"type": places[text], places[text]: None})
            elif text:
                parts.append({"type": "text", "text": text})
    return parts


def _fill(contents: list[list[dict[str, Any]]], first: int, kind: str, values: list[Any]) -> list[Any]:
    """Return what a chat has of a kind, in its order, and take it out of its parts.

    Parts without one of their own have those of `values`, in their order; without parts, the `first` message
    begins with these.
    """
    places = [part for content in contents for part in content if part["type"] == kind]
    if not places and contents:
        places = [{"type": kind, kind: value} for value in values]
        contents[first] = places + contents[first]
    empty = sum(part[kind] is None for part in places)
    if empty and empty != len(values):
        name = _NAMES[kind]
        raise UnusableRow(f"it has {empty} places for {name}s and {len(values)} {name}s")
    remaining = iter(values)
    media = [part.pop(kind) for part in places]
    return [next(remaining) if value is None else value for value in media]
