"""Find the text or the chat in a row of a dataset; knows no files and no tokenizers."""

from collections.abc import Mapping
from typing import Any

from calib.errors import InputError

Message = dict[str, Any]
Document = str | list[Message]
Row = str | Mapping[str, Any]  # a bare string is a document of its own
LocatedRow = tuple[str, Row]  # its place, such as "a.jsonl, line 3", and the row

CHAT_COLUMNS = ("messages", "conversations", "conversation")
TEXT_COLUMNS = ("text", "content", "document")
OPENING_COLUMNS = ("prompt", "instruction", "question")
CONTINUING_COLUMNS = ("input", "completion", "response", "output", "answer")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class UnusableRow(InputError):
    """A row holds no text that can be found."""


def find_document(row: Row, column: str | None) -> Document:
    """Return the chat or text of `row`: in `column`, else in the first column known to hold one.

    Raises:
        UnusableRow: there is no such column, it holds neither, or no column is an obvious choice.
    """
    if isinstance(row, str):
        return row
    if not row:
        raise UnusableRow("the row holds nothing")
    if column is not None and column not in row:
        raise UnusableRow(f"no column '{column}' in the dataset; {_columns(row)}")
    if column is not None:
        return _document(row, column)
    for name in (*CHAT_COLUMNS, *TEXT_COLUMNS):
        if name in row:
            return _document(row, name)
    for name in OPENING_COLUMNS:
        if name in row:
            return _joined(row, name)
    return _document(row, _only_string_column(row))


def is_blank(document: Document) -> bool:
    """Whether there is nothing to read: white space only, or no message with content."""
    if isinstance(document, str):
        return not document.strip()
    return not any((text_of(message) or "").strip() for message in document)


def text_of(message: Message) -> str | None:
    """The content of a message; its parts are joined with line breaks, as vLLM joins them."""
    content: str | list[dict[str, str]] | None = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content


def _document(row: Mapping[str, Any], column: str) -> Document:
    value = row[column]
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return [_message(message, column) for message in value]
    raise UnusableRow(
        f"column '{column}' holds {type(value).__name__}, neither text nor a list of "
        f"chat messages; {_columns(row)}"
    )


def _message(message: Mapping[str, Any], column: str) -> Message:
    if "role" in message:
        # Arrow fills absent keys with None, and templates ask only whether a key is there
        kept = {k: v for k, v in message.items() if v is not None or k == "content"}
        return {k: _content(v, column) if k == "content" else v for k, v in kept.items()}
    if isinstance(message.get("from"), str) and "value" in message:
        role = SHAREGPT_ROLES.get(message["from"], message["from"])
        return {"role": role, "content": _content(message["value"], column)}
    raise UnusableRow(
        f"a chat message in column '{column}' has the keys {', '.join(message)}; "
        f"it needs role and content, or from and value"
    )


def _content(content: Any, column: str) -> str | list[dict[str, str]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise UnusableRow(
            f"a chat message in column '{column}' holds {type(content).__name__}, neither text nor parts"
        )
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = f"'{part.get('type')}'"
            raise UnusableRow(
                f"a chat message in column '{column}' has a part of type {kind}"
                f"{' without text' if kind == repr('text') else ''}; only text can be read"
            )
    return [{"type": "text", "text": part["text"]} for part in content]


def _joined(row: Mapping[str, Any], opening: str) -> Document:
    first = _document(row, opening)
    # an answer of another type is a label, such as the number of a choice
    names = [name for name in CONTINUING_COLUMNS if isinstance(row.get(name), type(first))]
    rest = [_document(row, name) for name in names]
    if isinstance(first, str):
        return "\n\n".join(part for part in (first, *rest) if isinstance(part, str) and part)
    return [message for part in (first, *rest) for message in part if isinstance(message, dict)]


def _only_string_column(row: Mapping[str, Any]) -> str:
    names = [name for name, value in row.items() if isinstance(value, str)]
    if len(names) != 1:
        raise UnusableRow(f"cannot tell which column holds the text; {_columns(row)}")
    return names[0]


def _columns(row: Mapping[str, Any]) -> str:
    return f"columns: {', '.join(row)}; choose one with `--set data.column=NAME`"
