"""Documents to token ids, as the model would see them when it serves. Knows no files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from calib.data.documents import Document, Message, Row, find_document, is_blank
from calib.errors import InputError
from calib.recipe import DataRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# a template that refuses this many chats in a row at the start will not accept the rest
MAX_REFUSALS = 100


class TemplateRefusal(Exception):
    """The chat template cannot express a chat, such as one with a system prompt."""


def tokenize_rows(
    rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, recipe: DataRecipe
) -> tuple[list[list[int]], tuple[str, ...]]:
    """Tokenise rows until there are `recipe.samples`; return them and warnings.

    Raises:
        InputError: no row holds anything the tokenizer can use.
    """
    samples: list[list[int]] = []
    refusals: list[str] = []
    for row in rows:
        document = find_document(row, recipe.column)
        try:
            ids = [] if is_blank(document) else encode(document, tokenizer)[: recipe.seq_len]
        except TemplateRefusal as error:
            ids = []
            refusals.append(str(error))
        if ids:
            samples.append(ids)
        if len(samples) == recipe.samples or (not samples and len(refusals) == MAX_REFUSALS):
            break
    if not samples:
        raise InputError(_nothing_usable(recipe.dataset, refusals))
    return samples, _warnings(recipe, len(samples), refusals)


def encode(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text with the tokenizer's special tokens, or of a templated chat.

    Text needs the special tokens because the one at position 0 often carries the largest keys.
    A chat template writes them itself, and a second BOS would be text no engine ever sends.

    Raises:
        InputError: a chat was given and the tokenizer has no template.
        TemplateRefusal: the template rejects this chat.
    """
    is_text = isinstance(document, str)
    text = document if isinstance(document, str) else _render(document, tokenizer)
    # not verbose: the advice about too long sequences does not apply, they are cut
    ids = tokenizer(text, add_special_tokens=is_text, verbose=False)["input_ids"]
    return [int(i) for i in ids]


def _render(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            "the dataset holds chats but the tokenizer has no chat template; use a dataset with "
            "a text column (`--set data.column=NAME`) or a model whose tokenizer has a template"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    # TypeError: templates add strings without checking that the content is one
    except (TemplateError, TypeError) as error:
        raise TemplateRefusal(" ".join(str(error).split())) from error


def _nothing_usable(dataset: str, refusals: list[str]) -> str:
    if refusals:
        return (
            f"the tokenizer's chat template refused every chat of dataset '{dataset}' "
            f"({refusals[0]}); use another dataset, or one with a text column"
        )
    return f"dataset '{dataset}' is empty: no row holds any text; use another dataset or column"


def _warnings(recipe: DataRecipe, found: int, refusals: list[str]) -> tuple[str, ...]:
    warnings = []
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
