"""Documents to token ids, as the model would see them when it serves. Knows no files."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import TemplateError

from calib.data.documents import (
    Document,
    LocatedRow,
    Message,
    UnusableRow,
    find_document,
    is_blank,
    text_of,
)
from calib.data.pieces import Piece, Pieces
from calib.errors import InputError
from calib.recipe import DataRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# where this many rows at the start are of no use, the rest will not be either
MAX_REFUSALS = 100
# places looked for in a long chat; each takes rendering it once
MAX_TURNS = 256

_MARK = "fp8kv"


class TemplateRefusal(Exception):
    """The chat template cannot express a chat, such as one with a system prompt."""


class Tokenized(NamedTuple):
    """Samples, warnings, and how many words became how many tokens before they were cut."""

    pieces: list[Piece]
    warnings: tuple[str, ...]
    words: tuple[int, int]


def tokenize_rows(
    rows: Iterable[LocatedRow], tokenizer: PreTrainedTokenizerBase, recipe: DataRecipe
) -> Tokenized:
    """Tokenise rows until there are `recipe.samples`; return them and warnings.

    Documents give their beginnings. Where these are too few, long ones give more; see `Pieces`.
    """
    pieces = Pieces(recipe.samples, recipe.seq_len, _opening(tokenizer))
    chats: list[tuple[int, list[Message], list[int]]] = []  # the long ones
    words = word_tokens = 0
    refusals: list[str] = []  # by the template
    unusable: list[str] = []  # rows, and why
    for where, row in rows:
        ids: list[int] = []
        try:
            document = find_document(row, recipe.column)
            ids = [] if is_blank(document) else encode(document, tokenizer)
        except TemplateRefusal as error:
            refusals.append(str(error))
        except UnusableRow as error:
            unusable.append(f"{where}: {error}")
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        else:
            words += _count_words(document)
            word_tokens += len(ids)
        if ids:
            number = pieces.add(ids)
            if isinstance(document, str):
                pieces.cut(number, ids)
            elif len(ids) > recipe.seq_len:
                chats.append((number, document, ids))
        useless = not pieces.first and len(refusals) + len(unusable) == MAX_REFUSALS
        if len(pieces.first) == recipe.samples or useless:
            break
    if not pieces.first:
        raise InputError(_nothing_usable(recipe.dataset, words, refusals, unusable))
    if len(pieces.first) < recipe.samples:
        for number, messages, ids in chats:
            pieces.cut(number, ids, _turns(messages, tokenizer))
    taken = pieces.all()
    return Tokenized(taken, _warnings(recipe, len(taken), refusals, unusable), (words, word_tokens))


def encode(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text with the tokenizer's special tokens, or of a templated chat.

    Text needs the special tokens because the one at position 0 often carries the largest keys.
    A chat template writes them itself, and a second BOS would be text no engine ever sends.

    Raises:
        InputError: a chat was given and the tokenizer has no template, or the text is damaged.
        TemplateRefusal: the template rejects this chat.
    """
    is_text = isinstance(document, str)
    text = document if isinstance(document, str) else _render(document, tokenizer)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start} is half of a surrogate pair, which is no text; fix or remove the row"
        ) from None
    # not verbose: the advice about too long sequences does not apply, they are cut
    ids = tokenizer(text, add_special_tokens=is_text, verbose=False)["input_ids"]
    return [int(i) for i in ids]


def _opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that `tokenizer` puts in front of every text."""
    both = (tokenizer("a", add_special_tokens=special) for special in (True, False))
    ids, bare = ([int(i) for i in each["input_ids"]] for each in both)
    starts = (i for i in range(len(ids)) if ids[i : i + len(bare)] == bare)
    return ids[: next(starts, 0)]


def _turns(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a chat at which turns begin, as far as the template tells.

    A turn begins where the chat ends without it. Some templates write the turns before it
    otherwise then, and it is not known.
    """
    if not tokenizer.is_fast:
        return []
    text = _render(messages, tokenizer)
    step = -(-len(messages) // MAX_TURNS)
    ends = []
    for count in range(step, len(messages), step):
        with suppress(TemplateRefusal):
            before = _render(messages[:count], tokenizer)
            ends += [len(before)] * text.startswith(before)
    offsets = {"return_offsets_mapping": True, "add_special_tokens": False, "verbose": False}
    starts = [start for start, _ in tokenizer(text, **offsets)["offset_mapping"]]
    return sorted({bisect_left(starts, end) for end in ends if end})


def unknown_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that stand for what `tokenizer` does not know, and for nothing else."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    # transformers may not know the token that the model inside writes
    found = {tokenizer.unk_token_id, getattr(model, "unk_id", None)}
    if model is not None and getattr(model, "unk_token", None):
        found.add(model.token_to_id(model.unk_token))
    return frozenset(found - {None, tokenizer.bos_token_id, tokenizer.eos_token_id})


def _count_words(document: Document) -> int:
    texts = [document] if isinstance(document, str) else map(text_of, document)
    return sum(len((text or "").split()) for text in texts)


def _render(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            "the dataset holds chats but the tokenizer has no chat template; use a dataset with "
            "a text column (`--set data.column=NAME`) or a model whose tokenizer has a template"
        )
    write = text_of if _takes_strings(tokenizer) else _parts
    written = [m | {"content": write(m)} if m.get("content") else m for m in messages]
    return _applied(written, tokenizer)


def _parts(message: Message) -> list[dict[str, str]]:
    content = message["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _takes_strings(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template writes content that is a string; those of some take parts alone."""
    try:
        return _MARK in _applied([{"role": "user", "content": _MARK}], tokenizer)
    except TemplateRefusal:
        return True


def _applied(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    # TypeError: templates add strings without checking that the content is one
    except (TemplateError, TypeError) as error:
        raise TemplateRefusal(" ".join(str(error).split())) from error


def _nothing_usable(dataset: str, words: int, refusals: list[str], unusable: list[str]) -> str:
    if words:
        return (
            f"the {words:,} words of dataset '{dataset}' became no tokens; check that "
            "tokenizer_config.json names the class that tokenizer.json is for"
        )
    if unusable:
        return unusable[0]
    if refusals:
        return (
            f"the tokenizer's chat template refused every chat of dataset '{dataset}' "
            f"({refusals[0]}); use another dataset, or one with a text column"
        )
    return f"dataset '{dataset}' is empty: no row holds any text; use another dataset or column"


def _warnings(recipe: DataRecipe, found: int, refusals: list[str], unusable: list[str]) -> tuple[str, ...]:
    warnings = []
    if unusable:
        warnings.append(
            f"{len(unusable)} rows were skipped: they hold no text that can be read (such as {unusable[0]})"
        )
    if refusals:
        warnings.append(
            f"{len(refusals)} chats were skipped because the tokenizer's chat template refused "
            f"them ({refusals[0]})"
        )
    if found < recipe.samples:
        warnings.append(
            f"{recipe.samples} samples were asked for and dataset '{recipe.dataset}' has {found}; "
            f"all {found} are used"
        )
    return tuple(warnings)
