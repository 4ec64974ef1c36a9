"""Rows with pictures or sound to samples, made by the model's own processor as a served request is.

A sample is a batch of its own: processors pad text on one side and pictures each in their own way, and one
sample needs no padding. Pixels are made again when the model reads them, so that none stay in memory.
"""

from __future__ import annotations

import hashlib
import re
import wave
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calib.data.samples import (
    Document,
    LocatedRow,
    MediaSample,
    Piece,
    Row,
    SkippedRows,
    Tokenized,
    UnusableRow,
    apply_template,
    columns_read,
    count_words,
    find_document,
)
from calib.errors import InputError, one_line
from calib.files.model_directory import ModelDirectory
from calib.models.config import model_positions
from calib.models.load import load_processor
from calib.recipe import DataRecipe

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig, ProcessorMixin

# types of parts of a message, in the order of MODALITIES: names, usual columns, and the part of a processor
_KINDS = {
    "image": ("picture", ("images", "image"), "image_processor"),
    "audio": ("sound", ("audio", "audios"), "feature_extractor"),
}
# what processors raise for text and pictures that do not fit each other
_REFUSALS = (ValueError, TypeError, LookupError, RuntimeError, AttributeError, OSError, EOFError)
Media = dict[str, list[Any]]  # the pictures and sounds of a prompt, of each kind in their order


@dataclass(frozen=True)
class MediaReader:
    """The processor of a model that takes pictures or sound, loaded when it is used."""

    checkpoint: ModelDirectory
    config: PreTrainedConfig
    trust_code: bool

    @cached_property
    def processor(self) -> ProcessorMixin:
        """The model's processor, as transformers loads it."""
        return load_processor(self.checkpoint, self.trust_code)

    def read(self, rows: Iterable[LocatedRow], recipe: DataRecipe, folder: Path | None) -> Tokenized:
        """Make samples of rows until there are `recipe.samples`; paths in them are relative to `folder`.

        Text behind the last picture or sound is cut at `recipe.seq_len`; these are never cut. Refuse a
        dataset of which none can be read.
        """
        skipped = SkippedRows()
        samples, places = [], list[str]()
        for sample in islice(
            skipped.others(rows, lambda row: self._read(row, recipe, folder)), recipe.samples
        ):
            samples.append(sample)
            places.append(skipped.place)
        pieces = [piece._replace(document=i) for i, (piece, *_) in enumerate(samples)]
        words = sum(x for _, _, x, _ in samples), sum(x for *_, x in samples)
        columns = {name: kind for _, own, *_ in samples for name, kind in own.items()}
        if not any(any(piece.media.counts) for piece in pieces if piece.media):
            reason = next(iter([*skipped.unusable, *skipped.refusals]), "no row has one")
            raise InputError(f"no picture or sound of dataset '{recipe.dataset}' can be read: {reason}")
        return Tokenized(pieces, skipped.warnings(recipe, len(pieces)), words, columns, places)

    def _read(
        self, row: Row, recipe: DataRecipe, folder: Path | None
    ) -> tuple[Piece, dict[str, str], int, int]:
        """Return what is read of a row, of which columns, and its words and tokens before it was cut."""
        document = find_document(row, recipe.column, media=True)
        prompt, media = self._prompt(document, row, recipe)
        ids, arguments = self._process(prompt, media, folder)
        modalities = self._modalities(ids, media)
        last = int(modalities.nonzero().max()) + 1 if modalities.any() else 0
        length, positions = max(min(recipe.seq_len, len(ids)), last), model_positions(self.config)
        if positions and length > positions:
            raise UnusableRow(f"its media reach to token {last:,}, and the model has {positions:,} positions")

        def cut(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
            return {x: y[:, :length] if y.shape == (1, len(ids)) else y for x, y in arguments.items()}

        digest = hashlib.sha256()
        for name, x in sorted(cut(arguments).items()):
            digest.update(f"{name} {x.dtype} {[*x.shape]}".encode() + x.contiguous().numpy().tobytes())
        counts = tuple(map(len, media.values()))
        sample = MediaSample(
            counts, modalities[:length], digest.digest(), lambda: cut(self._process(prompt, media, folder)[1])
        )
        piece, columns = Piece(0, length, ids[:length].tolist(), sample), columns_read(row, recipe.column)
        return piece, columns, count_words(document), len(ids)

    def _prompt(self, document: Document, row: Row, recipe: DataRecipe) -> tuple[dict[str, Any], Media]:
        """Write a row's prompt: a chat by the processor's template, text with places for media as it is."""
        kinds = {kind for kind, (*_, part) in _KINDS.items() if getattr(self.processor, part, None)}
        tokens = {x: str(getattr(self.processor, f"{x}_token", None) or f"<{x}>") for x in _KINDS}
        places = {text: kind for kind in kinds for text in (f"<{kind}>", tokens[kind])}
        chat = document if isinstance(document, list) else [{"role": "user", "content": document}]
        contents = [[*_parts(message.get("content"), places)] for message in chat]
        has_places = any("text" not in part for parts in contents for part in parts)
        first = next((i for i, message in enumerate(chat) if message.get("role") == "user"), 0)
        media, named = dict[str, list[Any]](), row if isinstance(row, Mapping) else {}
        for kind, column in (("image", recipe.images), ("audio", recipe.audio)):
            name, usual, _ = _KINDS[kind]
            own = (column,) if column else usual if kind in kinds else ()
            value = next((named[x] for x in own if x in named), None)
            values = [x for x in (value if isinstance(value, list) else [value]) if x is not None]
            media[kind] = _fill(contents, first, kind, values)
            if media[kind] and kind not in kinds:
                raise UnusableRow(f"the model's processor takes no {name}")
            if column and not media[kind]:
                raise UnusableRow(f"it has no {name} in column '{column}'; columns: {', '.join(named)}")
        if isinstance(document, str) and (has_places or not getattr(self.processor, "chat_template", None)):
            end = "" if has_places else "\n"  # models tell pictures apart by what is between
            text = "".join(x["text"] if "text" in x else tokens[x["type"]] + end for x in contents[0])
            return {"text": [text]}, media
        written = [message | {"content": content} for message, content in zip(chat, contents, strict=True)]
        return {"text": [apply_template(written, self.processor)], "add_special_tokens": False}, media

    def _process(
        self, prompt: Mapping[str, Any], media: Media, folder: Path | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return token ids [T] and the model's other arguments, but the mask."""
        options: dict[str, Any] = {}
        if media["image"]:
            options["images"] = [[open_picture(x, folder) for x in media["image"]]]
        if media["audio"]:
            rate = options["sampling_rate"] = self.processor.feature_extractor.sampling_rate
            options["audio"] = [open_sound(x, folder, rate) for x in media["audio"]]
        try:
            outputs = dict(self.processor(return_tensors="pt", **prompt, **options))
        except _REFUSALS as error:
            raise UnusableRow(f"the model's processor refuses it ({one_line(error)})") from error
        if not all(isinstance(x, Tensor) for x in outputs.values()):
            raise InputError("the model's processor makes inputs that are not tensors; calibrate it on text")
        outputs.pop("attention_mask", None)
        return outputs.pop("input_ids")[0], outputs

    def _modalities(self, ids: Tensor, media: Media) -> Tensor:
        """Return what each token is a part of, as an index in MODALITIES [T]."""
        modalities = torch.zeros_like(ids)
        for number, kind in enumerate(media, 1):
            names = (f"{kind}_token_id", f"{kind}_token_index")
            values = (getattr(x, name, None) for x in (self.config, self.processor) for name in names)
            modalities[ids == next((i for i in values if isinstance(i, int)), -1)] = number
            if media[kind] and number not in modalities:
                raise UnusableRow(
                    f"no token stands for its {_KINDS[kind][0]}: the chat template leaves it out, or neither "
                    f"the config nor {type(self.processor).__name__} names that token"
                )
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


def _parts(content: Any, places: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a message; what stands for a picture or sound in its text is one of them."""
    pattern = f"({'|'.join(map(re.escape, places))})"
    for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
        for text in re.split(pattern, part["text"]) if "text" in part else ():
            if text:
                kind = places.get(text, "text")
                yield {"type": kind, kind: text if kind == "text" else None}
        if "text" not in part:
            yield part


def _fill(contents: list[list[dict[str, Any]]], first: int, kind: str, values: list[Any]) -> list[Any]:
    """Take what a chat has of a kind out of its parts; `values` fill empty ones, or begin its `first`."""
    places = [part for content in contents for part in content if part["type"] == kind]
    if not places and contents:
        places = [{"type": kind, kind: value} for value in values]
        contents[first] = places + contents[first]
    empty = [part for part in places if part[kind] is None]
    if empty and len(empty) != len(values):
        name = _KINDS[kind][0]
        raise UnusableRow(f"it has {len(empty)} places for {name}s and {len(values)} {name}s")
    for part, value in zip(empty, values, strict=False):
        part[kind] = value
    return [part.pop(kind) for part in places]
