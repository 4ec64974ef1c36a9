"""Rows of a dataset to samples: their documents, tokenised as the model sees them when it serves, and cut."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jinja2 import TemplateError
from torch import Tensor

from calib.errors import InputError, one_line
from calib.recipe import DataRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

T = TypeVar("T", bound=tuple[Any, ...])
Message = dict[str, Any]
Document = str | list[Message]
Row = str | Mapping[str, Any]  # a bare string is a document of its own
LocatedRow = tuple[str, Row]  # its place, such as "a.jsonl, line 3", and the row

CHAT_COLUMNS = ("messages", "conversations", "conversation")
TEXT_COLUMNS = ("text", "content", "document")
OPENING_COLUMNS = ("prompt", "instruction", "question")
CONTINUING_COLUMNS = ("input", "completion", "response", "output", "answer")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
MEDIA_PARTS = ("image", "image_url", "audio", "audio_url", "input_audio")  # types of parts of a message

MAX_REFUSALS = 100  # rows without text at the start, after which no row is expected to have some
MAX_TURNS = 256  # places looked for in a long chat; each takes rendering it once
SMALLEST_PIECE = 8  # the end of a document is not read if it is shorter than a sample divided by this

_MARK = "fp8kv"


class UnusableRow(InputError):
    """A row without text that can be read."""


class TemplateRefusal(Exception):
    """A chat that the chat template cannot express, such as one with a system prompt."""


@dataclass(frozen=True)
class MediaSample:
    """The pictures and sounds of a sample, and where they are among its tokens."""

    counts: tuple[int, ...]  # of MODALITIES but text
    modalities: Tensor  # [T] int64, index in MODALITIES of what each token is a part of
    digest: bytes  # of the model's arguments
    # of the model's forward, of any shape, beside input_ids and attention_mask
    arguments: Callable[[], dict[str, Tensor]]

    def text(self, ids: list[int], skip_first: int) -> list[int]:
        """Return those of `ids` that are of text, and the first ones, which do not count."""
        modalities = self.modalities.tolist()
        return [i for at, i in enumerate(ids) if at < skip_first or not modalities[at]]


@dataclass
class SkippedRows:
    """Rows that cannot be read, and why."""

    refusals: list[str] = field(default_factory=list)  # the template's reasons
    unusable: list[str] = field(default_factory=list)  # places and reasons
    place: str = ""  # of the row that was read last

    def others(self, rows: Iterable[LocatedRow], read: Callable[[Row], T]) -> Iterator[T]:
        """Yield what `read` returns of rows, tokens last, if the first have any; an error names the row."""
        has_tokens = False
        for where, row in rows:
            try:
                result = read(row)
            except TemplateRefusal as error:
                self.refusals.append(str(error))
            except UnusableRow as error:
                self.unusable.append(f"{where}: {error}")
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
            else:
                has_tokens, self.place = has_tokens or bool(result[-1]), where
                yield result
            if not has_tokens and len(self.refusals) + len(self.unusable) == MAX_REFUSALS:
                return

    @property
    def example(self) -> str:
        """The first place among `unusable`, which are in no order, and its reason."""
        return min(self.unusable, key=lambda line: (len(line.partition(": ")[0]), line))

    def warnings(self, recipe: DataRecipe, count: int) -> tuple[str, ...]:
        """Return warnings of these rows, and of `count` samples where more were asked for."""
        warnings = []
        if rows := len(self.unusable):
            line = "1 row was skipped: it holds" if rows == 1 else f"{rows} rows were skipped: they hold"
            warnings.append(f"{line} no text that can be read (such as {self.example})")
        if chats := len(self.refusals):
            line = "1 chat was skipped" if chats == 1 else f"{chats} chats were skipped"
            warnings.append(f"{line}: the tokenizer's chat template refused with '{self.refusals[0]}'")
        if count < recipe.samples:
            line = "were asked for" if "samples" in recipe.model_fields_set else "are the default"
            line = f"{recipe.samples} samples {line} and dataset '{recipe.dataset}' has {count}"
            warnings.append(f"{line}; {'it is' if count == 1 else f'all {count} are'} used")
        return tuple(warnings)


class Piece(NamedTuple):
    """Token ids of a sample, and their part of a document."""

    document: int
    tokens: int  # of the document, without a repeated opening
    ids: list[int]
    media: MediaSample | None = None  # of a row that a processor has read


class Tokenized(NamedTuple):
    """Samples, warnings, and how many words became how many tokens before they were cut."""

    pieces: list[Piece]
    warnings: tuple[str, ...]
    words: tuple[int, int]
    columns: dict[str, str]  # that were read, each as `text` or `chats`
    places: Sequence[str] = ()  # of the documents


def tokenize_rows(
    rows: Iterable[LocatedRow], tokenizer: PreTrainedTokenizerBase, recipe: DataRecipe
) -> Tokenized:
    """Tokenise rows until there are `recipe.samples` documents, or pieces of documents.

    Documents give their beginnings. Where these are too few, long ones give more; see `Pieces`.
    Raises an InputError where no row has text.
    """
    pieces, skipped = Pieces(recipe.samples, recipe.seq_len, _opening(tokenizer)), SkippedRows()
    long_chats: list[tuple[int, list[Message], list[int]]] = []
    words, word_tokens, columns, places = 0, 0, dict[str, str](), list[str]()

    def read(row: Row) -> tuple[Row, Document, list[int]]:
        document = find_document(row, recipe.column)
        return row, document, encode(document, tokenizer) if count_words(document) else []

    for row, document, ids in skipped.others(rows, read):
        words, word_tokens = words + count_words(document), word_tokens + len(ids)
        if ids:
            columns |= columns_read(row, recipe.column)
            number = pieces.add(ids)
            places.append(skipped.place)
            if isinstance(document, str):
                pieces.cut(number, ids)
            elif len(ids) > recipe.seq_len:
                long_chats.append((number, document, ids))
        if len(pieces.first) == recipe.samples:
            break
    if not pieces.first:
        raise InputError(_nothing_usable(recipe.dataset, words, skipped))
    if len(pieces.first) < recipe.samples:
        for number, messages, ids in long_chats:
            pieces.cut(number, ids, _turns(messages, tokenizer))
    samples = pieces.all()
    return Tokenized(samples, skipped.warnings(recipe, len(samples)), (words, word_tokens), columns, places)


def columns_read(row: Row, column: str | None) -> dict[str, str]:
    """Name the columns of `row` that `find_document` reads, each with what it holds: `text` or `chats`.

    Raises:
        UnusableRow: the column is missing, or no column is an obvious choice.
    """
    if isinstance(row, str):
        return {}
    if not row:
        raise UnusableRow("the row holds nothing")
    if column is not None and column not in row:
        raise UnusableRow(f"no column '{column}' in the dataset; {_choice(row)}")
    usual = (name for name in (*CHAT_COLUMNS, *TEXT_COLUMNS, *OPENING_COLUMNS) if name in row)
    name = next(usual, None) if column is None else column
    if name is None:
        strings = [name for name, value in row.items() if isinstance(value, str)]
        if len(strings) != 1:
            raise UnusableRow(f"cannot tell which column holds the text; {_choice(row)}")
        name = strings[0]
    names, kind = [name], list if isinstance(row[name], list) else str
    if column is None and name in OPENING_COLUMNS:
        # an answer of another type is a label, such as the number of a choice
        names += [name for name in CONTINUING_COLUMNS if isinstance(row.get(name), kind)]
    return dict.fromkeys(names, "chats" if kind is list else "text")


def find_document(row: Row, column: str | None, *, media: bool = False) -> Document:
    """Return the chat or text in `column` of `row`, by default in the first column of a usual name.

    With `media`, messages keep pictures and sounds, as parts `{"type": "image", "image": ...}`.

    Raises:
        UnusableRow: the column is missing, or holds neither; or no column is an obvious choice.
    """
    columns = columns_read(row, column)
    if isinstance(row, str):
        return row
    parts = [_document(row[name], name, _choice(row), media) for name in columns]
    if "chats" in columns.values():
        return [message for part in parts for message in part if isinstance(message, dict)]
    return "\n\n".join(part for part in parts if isinstance(part, str) and part)


def _choice(row: Mapping[str, Any]) -> str:
    hint = "; choose one with `--set data.column=NAME`" if len(row) > 1 else ""
    return f"columns: {', '.join(row)}{hint}"


def has_media(row: Row) -> bool:
    """Return whether a chat in `row` has a part that is a picture or sound."""
    columns = row.values() if isinstance(row, Mapping) else ()
    messages = (m for x in columns if isinstance(x, list) for m in x if isinstance(m, Mapping))
    parts = (part for m in messages if isinstance(m.get("content"), list) for part in m["content"])
    return any(isinstance(part, Mapping) and part.get("type") in MEDIA_PARTS for part in parts)


def count_words(document: Document) -> int:
    """Count the words of a text, or of all messages of a chat."""
    texts = [document] if isinstance(document, str) else map(message_text, document)
    return sum(len((text or "").split()) for text in texts)


def message_text(message: Message) -> str | None:
    """Return the content of a message; line breaks join its parts, as in vLLM."""
    content: str | list[dict[str, str]] | None = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part["type"] == "text")
    return content


def _document(value: Any, column: str, columns: str, media: bool) -> Document:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return [_message(message, f"a chat message in column '{column}'", media) for message in value]
    raise UnusableRow(
        f"column '{column}' holds {type(value).__name__}, neither text nor a list of chat messages; {columns}"
    )


def _message(message: Mapping[str, Any], where: str, media: bool) -> Message:
    if "role" in message:
        # Arrow fills absent keys with None, and templates ask only whether a key is there
        plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    elif isinstance(message.get("from"), str) and "value" in message:
        role = SHAREGPT_ROLES.get(message["from"], message["from"])
        plain = {"role": role, "content": message["value"]}
    else:
        keys = ", ".join(message)
        raise UnusableRow(f"{where} has the keys {keys}; it needs role and content, or from and value")
    content = plain.get("content")
    if content is None or isinstance(content, str):
        return plain
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise UnusableRow(f"{where} holds {type(content).__name__}, neither text nor parts")
    return plain | {"content": [_part(part, where, media) for part in content]}


def _part(part: Mapping[str, Any], where: str, media: bool) -> dict[str, Any]:
    kind = part.get("type")
    if media and kind in MEDIA_PARTS:
        name = "audio" if "audio" in kind else "image"
        value = next((part[key] for key in (kind, name, "url", "path") if part.get(key) is not None), None)
        is_link = kind.endswith("_url") and isinstance(value, Mapping)
        return {"type": name, name: value.get("url") if is_link and value else value}
    if kind != "text" or not isinstance(part.get("text"), str):
        without = " without text" if kind == "text" else ""
        readable = "text, pictures and sound" if media else "only text"
        raise UnusableRow(f"{where} has a part of type '{kind}'{without}; {readable} can be read")
    return {"type": "text", "text": part["text"]}


def encode(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text with the tokenizer's special tokens, or of a templated chat.

    Text needs the special tokens because the one at position 0 often carries the largest keys.
    A chat template writes them itself, and a second BOS would be text no engine ever sends.

    Raises:
        InputError: a chat was given and the tokenizer has no template, or the text is damaged.
        TemplateRefusal: the template rejects this chat.
    """
    text = document if isinstance(document, str) else _render(document, tokenizer)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start} is half of a surrogate pair, which is not text; fix or remove the row"
        ) from None
    # not verbose: the advice about too long sequences does not apply, they are cut
    ids = tokenizer(text, add_special_tokens=isinstance(document, str), verbose=False)["input_ids"]
    return [int(i) for i in ids]


def unknown_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that stand for what `tokenizer` does not know, and for nothing else."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    # transformers may not know the token that the model inside writes
    ids = {tokenizer.unk_token_id, getattr(model, "unk_id", None)}
    if model is not None and getattr(model, "unk_token", None):
        ids.add(model.token_to_id(model.unk_token))
    return frozenset(ids - {None, tokenizer.bos_token_id, tokenizer.eos_token_id})


def _opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that `tokenizer` puts in front of every text."""
    ids, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    return [int(i) for i in ids[: next((i for i in range(len(ids)) if ids[i : i + len(bare)] == bare), 0)]]


def _turns(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a chat at which turns begin: where the chat ends without them.

    Turns are left out if the template writes the ones before differently when they are the last.
    """
    if not tokenizer.is_fast:
        return []
    text = _render(messages, tokenizer)
    step = -(-len(messages) // MAX_TURNS)
    ends = []
    for count in range(step, len(messages), step):
        with suppress(TemplateRefusal):
            before = _render(messages[:count], tokenizer)
            if text.startswith(before):
                ends.append(len(before))
    offsets = {"return_offsets_mapping": True, "add_special_tokens": False, "verbose": False}
    starts = [start for start, _ in tokenizer(text, **offsets)["offset_mapping"]]
    return sorted({bisect_left(starts, end) for end in ends if end})


def _render(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """Write a chat with the tokenizer's template, content as strings where it takes these."""
    try:
        takes_strings = _MARK in apply_template([{"role": "user", "content": _MARK}], tokenizer)
    except TemplateRefusal:
        takes_strings = True
    written = []
    for message in messages:
        content = message.get("content")
        if content and takes_strings:
            message = message | {"content": message_text(message)}
        elif isinstance(content, str) and content:
            message = message | {"content": [{"type": "text", "text": content}]}
        written.append(message)
    return apply_template(written, tokenizer)


def apply_template(messages: list[Message], tokenizer: PreTrainedTokenizerBase | ProcessorMixin) -> str:
    """Write a chat with the template of a tokenizer or processor; a TemplateRefusal if it cannot.

    Raises an InputError without a template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "the dataset holds chats but the model has no chat template; use a dataset with a text "
            "column (`--set data.column=NAME`) or a model whose tokenizer has a template"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    # TypeError: templates add strings without checking that the content is one
    except (TemplateError, TypeError) as error:
        raise TemplateRefusal(one_line(error)) from error


def _nothing_usable(dataset: str, words: int, skipped: SkippedRows) -> str:
    if words:
        return (
            f"the {words:,} words of dataset '{dataset}' became no tokens; check that "
            "tokenizer_config.json names the class that tokenizer.json is for"
        )
    if len(skipped.unusable) == 1:
        return skipped.unusable[0]
    if skipped.unusable:
        return f"none of {len(skipped.unusable)} rows holds text that can be read (such as {skipped.example})"
    if skipped.refusals:
        return (
            f"the tokenizer's chat template refused every chat of dataset '{dataset}' "
            f"({skipped.refusals[0]}); use another dataset, or one with a text column"
        )
    return f"dataset '{dataset}' is empty: no row holds any text; use another dataset or column"


class Pieces:
    """Pieces of documents, up to a limit.

    The beginnings of all documents come first, in the documents' order. Further pieces of long
    documents follow, spread evenly over each, in proportion to its length. With a larger `limit`
    the same pieces come first, so a run can leave out what a smaller one has read.
    """

    def __init__(self, limit: int, seq_len: int, opening: Sequence[int]) -> None:
        self._limit, self._seq_len = limit, seq_len
        self._opening = list(opening) if len(opening) < seq_len else []
        self.first: list[Piece] = []
        self._ranked: list[tuple[float, Piece]] = []  # by rank

    def add(self, ids: Sequence[int]) -> int:
        """Add the beginning of a document alone, and return the document's number."""
        beginning = list(ids[: self._seq_len])
        self.first.append(Piece(len(self.first), len(beginning), beginning))
        return self.first[-1].document

    def cut(self, document: int, ids: Sequence[int], turns: Sequence[int] = ()) -> None:
        """Cut a whole document; `turns` are the tokens at which turns of a chat begin, to keep whole."""
        opening = self._opening if list(ids[: len(self._opening)]) == self._opening else []
        spans = list(self._spans(len(ids), len(opening), turns))
        end = spans[0][1]
        self.first[document] = Piece(document, end, list(ids[:end]))
        limit = self._limit - len(self.first)
        # one more than the limit, as one of them may rank last
        for rank, at in enumerate(islice(_spread(len(spans)), 1, limit + 2), 1):
            start, end = spans[at]
            piece = Piece(document, end - start, [*opening, *ids[start:end]])
            # what `add` took as a beginning comes last: a run with fewer samples has read it
            self._ranked.append((rank / len(spans) + (start < self._seq_len), piece))
        if len(self._ranked) > 2 * limit:
            self._ranked = sorted(self._ranked)[:limit]

    def all(self) -> list[Piece]:
        """Return all pieces, in their order."""
        return [*self.first, *(piece for _, piece in sorted(self._ranked)[: self._limit - len(self.first)])]

    def _spans(self, length: int, opening: int, turns: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield where consecutive pieces begin and end; a rest too short for one is left out."""
        start, end = 0, min(self._seq_len, length)
        while start < length and (not start or length - start >= self._seq_len // SMALLEST_PIECE):
            end = min(start + self._seq_len - (opening if start else 0), length)
            turn = bisect_right(turns, end) - 1
            if end < length and turn >= 0 and turns[turn] > start:
                following = turns[turn + 1] if turn + 1 < len(turns) else length
                if following - turns[turn] <= self._seq_len - opening:
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
