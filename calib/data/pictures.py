"""Rows with pictures to samples, made by the model's own processor as a served request is.

A sample is a batch of its own: processors pad text on one side and pictures each in their own way, and one
sample needs no padding. Pixels are made again when the model reads them, so that none stay in memory.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from calib.data.samples import (
    MAX_REFUSALS,
    Document,
    LocatedRow,
    PictureSample,
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
from calib.models.config import image_token_id, model_positions, takes_pictures
from calib.models.load import load_processor
from calib.recipe import DataRecipe

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig, ProcessorMixin

PICTURE_COLUMNS = ("images", "image")
_PLACE = "<image>"  # where texts that were written for LLaVA have a picture
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # of a processor; 0 stands for text
# what processors raise for text and pictures that do not fit each other
_REFUSALS = (ValueError, TypeError, LookupError, RuntimeError, AttributeError, OSError)


class Request(NamedTuple):
    """A prompt with the pictures in it, in their order."""

    text: str
    pictures: list[Any]
    is_chat: bool


@dataclass(frozen=True)
class PictureReader:
    """A processor, and what the model's config says of the tokens that it makes."""

    processor: ProcessorMixin
    image_token_id: int | None  # None: the processor marks the positions of pictures
    max_tokens: int | None  # positions of the model

    @classmethod
    def loader(
        cls, checkpoint: ModelDirectory, config: PreTrainedConfig, trust_code: bool
    ) -> Callable[[], PictureReader] | None:
        """Return a function that loads the model's processor, once; None for a model of text alone."""

        @cache
        def load() -> PictureReader:
            processor = load_processor(checkpoint, trust_code)
            return cls(processor, image_token_id(config), model_positions(config))

        return load if takes_pictures(checkpoint.config) else None

    def read(self, rows: Iterable[LocatedRow], recipe: DataRecipe, folder: Path | None) -> Tokenized:
        """Make samples of rows until there are `recipe.samples`; paths of pictures are relative to `folder`.

        Text behind the last picture is cut at `recipe.seq_len`; pictures are never cut.
        """
        pieces: list[Piece] = []
        refusals: list[str] = []
        unusable: list[str] = []
        words = tokens = 0
        for where, row in rows:
            try:
                document = find_document(row, recipe.column, pictures=True)
                request = self.request(document, row, recipe.images)
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
        if not any(piece.pictures.count for piece in pieces if piece.pictures):
            reason = next(iter([*unusable, *refusals]), "no row has one")
            raise InputError(f"no picture of dataset '{recipe.dataset}' can be read: {reason}")
        return Tokenized(pieces, row_warnings(recipe, len(pieces), refusals, unusable), (words, tokens))

    def request(self, document: Document, row: Row, column: str | None) -> Request:
        """Write the prompt of a row: a chat by the processor's template, and text with places as it is.

        Pictures without a place come first. An UnusableRow if pictures and places differ in number.
        """
        values = _column_pictures(row, column)
        token = str(getattr(self.processor, "image_token", None) or _PLACE)
        question = {"role": "user", "content": document}
        chat: list[dict[str, Any]] = document if isinstance(document, list) else [question]
        contents = [_parts(message.get("content"), token) for message in chat]
        has_places = any(part["type"] == "image" for content in contents for part in content)
        if not has_places and contents:
            first = next((i for i, message in enumerate(chat) if message.get("role") == "user"), 0)
            contents[first] = [{"type": "image", "image": picture} for picture in values] + contents[first]
        pictures = _fill(contents, values)
        if column is not None and not pictures:
            raise UnusableRow(f"it has no picture in column '{column}'")
        has_template = bool(getattr(self.processor, "chat_template", None))
        if isinstance(document, str) and (has_places or not has_template):
            place = token if has_places else f"{token}\n"  # models tell pictures apart by what is between
            text = "".join(part.get("text", place) for part in contents[0])
            return Request(text, pictures, is_chat=False)
        if not has_template:
            raise InputError(
                "the dataset holds chats but the processor has no chat template; use a dataset with a text "
                "column (`--set data.column=NAME`)"
            )
        written = [message | {"content": content} for message, content in zip(chat, contents, strict=True)]
        return Request(apply_template(written, self.processor), pictures, is_chat=True)

    def _sample(
        self, request: Request, folder: Path | None, seq_len: int
    ) -> tuple[int, list[int], PictureSample]:
        """Return the number of tokens of a request, those that are read, and its pictures."""
        outputs = self._process(request, folder)
        ids = outputs["input_ids"][0]
        positions = self._positions(outputs)
        if request.pictures and not positions.any():
            raise UnusableRow("the processor's chat template left its pictures out")
        last = int(positions.nonzero().max()) + 1 if positions.any() else 0
        length = max(min(seq_len, len(ids)), last)
        if self.max_tokens and length > self.max_tokens:
            raise UnusableRow(
                f"its pictures reach to token {last:,}, and the model has {self.max_tokens:,} positions"
            )
        digest = hashlib.sha256()
        for name, x in sorted(self._arguments(outputs, length).items()):
            digest.update(f"{name} {x.dtype} {[*x.shape]}".encode() + x.contiguous().numpy().tobytes())

        def arguments() -> dict[str, Tensor]:
            return self._arguments(self._process(request, folder), length)

        sample = PictureSample(len(request.pictures), positions[:length].long(), digest.digest(), arguments)
        return len(ids), ids[:length].tolist(), sample

    def _process(self, request: Request, folder: Path | None) -> dict[str, Tensor]:
        pictures = [open_picture(picture, folder) for picture in request.pictures]
        try:
            outputs = self.processor(
                text=[request.text],
                images=[pictures] if pictures else None,
                return_tensors="pt",
                add_special_tokens=not request.is_chat,
            )
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

    def _positions(self, outputs: dict[str, Tensor]) -> Tensor:
        ids = outputs["input_ids"][0]
        if self.image_token_id is not None:
            return ids == self.image_token_id
        for name in _TOKEN_TYPES:
            if name in outputs:
                return outputs[name][0] != 0
        raise InputError(
            f"neither the model's config nor its {type(self.processor).__name__} says which tokens stand for "
            "pictures; calibrate it on text"
        )


def open_picture(value: Any, folder: Path | None) -> Image:
    """Open a picture: bytes, a path, a data URL, an image of PIL, or the record of a column of images."""
    from PIL import Image

    record = value if isinstance(value, Mapping) else {}
    source = record.get("bytes") or record.get("path") if record else value
    name = f"'{source:.80}'" if isinstance(source, str) else f"of {type(source).__name__}"
    try:
        if isinstance(source, str) and source.startswith(("http://", "https://")):
            raise ValueError("it is an address: download it, and give its path")
        if isinstance(source, str):
            _, is_data, data = source.partition(";base64,")
            source = b64decode(data, validate=True) if is_data else (folder or Path()) / source
        if not isinstance(source, Image.Image):
            source = Image.open(BytesIO(source) if isinstance(source, bytes) else Path(source or ""))
        return source.convert("RGB")
    except (*_REFUSALS, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
    raise UnusableRow(f"its picture {name} cannot be read ({reason})")


def _column_pictures(row: Row, column: str | None) -> list[Any]:
    """Return the pictures in `column` of `row`, by default in one of a usual name."""
    columns = row if isinstance(row, Mapping) else {}
    if column is not None and column not in columns:
        raise UnusableRow(f"no column '{column}' in the dataset; columns: {', '.join(columns)}")
    name = column or next((x for x in PICTURE_COLUMNS if x in columns), None)
    value = columns[name] if name is not None else None
    return [x for x in (value if isinstance(value, list) else [value]) if x is not None]


def _parts(content: Any, token: str) -> list[dict[str, Any]]:
    """Return the parts of a message; what stands for a picture in its text is one of them."""
    parts: list[dict[str, Any]] = []
    for part in [{"type": "text", "text": content or ""}] if not isinstance(content, list) else content:
        if part["type"] == "image":
            parts.append(part)
            continue
        for number, text in enumerate(re.split(f"{re.escape(_PLACE)}|{re.escape(token)}", part["text"])):
            parts += [{"type": "image", "image": None}] * (number > 0)
            parts += [{"type": "text", "text": text}] * bool(text)
    return parts


def _fill(contents: list[list[dict[str, Any]]], values: list[Any]) -> list[Any]:
    """Return the pictures of a chat in their order, and take `values` out of its parts.

    Parts without a picture of their own have those of `values`, in their order.
    """
    places = [part for content in contents for part in content if part["type"] == "image"]
    empty = sum(part["image"] is None for part in places)
    if empty and empty != len(values):
        raise UnusableRow(f"it has {empty} places for pictures and {len(values)} pictures")
    remaining = iter(values)
    pictures = [part.pop("image") for part in places]
    return [next(remaining) if picture is None else picture for picture in pictures]
