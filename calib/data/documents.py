"""The text or the chat in a row of a dataset."""

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
    """A row without text that can be read."""


def find_document(row: Row, column: str | None) -> Document:
    """Return the chat or text in `column` of `row`, by default in the first column of a usual name.

    Raises:
        UnusableRow: the column is missing, or holds neither; or no column is an obvious choice.
    """
    if isinstance(row, str):
        return row
    if not row:
        raise UnusableRow("the row holds nothing")
    columns = f"columns: {', '.join(row)}; choose one with `--set data.column=NAME`"
    if column is not None and column not in row:
        raise UnusableRow(f"no column '{column}' in the dataset; {columns}")
    usual = (name for name in (*CHAT_COLUMNS, *TEXT_COLUMNS, *OPENING_COLUMNS) if name in row)
    name = next(usual, None) if column is None else column
    if name is None:
        strings = [name for name, value in row.items() if isinstance(value, str)]
        if len(strings) != 1:
            raise UnusableRow(f"cannot tell which column holds the text; {columns}")
        name = strings[0]
    document = _document(row[name], name, columns)
    if column is not None or name not in OPENING_COLUMNS:
        return document
    # an answer of another type is a label, such as the number of a choice
    names = [name for name in CONTINUING_COLUMNS if isinstance(row.get(name), type(document))]
    parts = [document, *(_document(row[name], name, columns) for name in names)]
    if isinstance(document, str):
        return "\n\n".join(part for part in parts if isinstance(part, str) and part)
    return [message for part in parts for message in part if isinstance(message, dict)]


def count_words(document: Document) -> int:
    """Count the words of a text, or of all messages of a chat."""
    texts = [document] if isinstance(document, str) else map(message_text, document)
    return sum(len((text or "").split()) for text in texts)


def message_text(message: Message) -> str | None:
    """Return the content of a message; line breaks join its parts, as in vLLM."""
    content: str | list[dict[str, str]] | None = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content


def _document(value: Any, column: str, columns: str) -> Document:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return [_message(message, f"a chat message in column '{column}'") for message in value]
    raise UnusableRow(
        f"column '{column}' holds {type(value).__name__}, neither text nor a list of chat messages; {columns}"
    )


def _message(message: Mapping[str, Any], where: str) -> Message:
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
    for part in content:
        if part.get("type") != "text":
            raise UnusableRow(f"{where} has a part of type '{part.get('type')}'; only text can be read")
        if not isinstance(part.get("text"), str):
            raise UnusableRow(f"{where} has a part of type 'text' without text; only text can be read")
    return plain | {"content": [{"type": "text", "text": part["text"]} for part in content]}
