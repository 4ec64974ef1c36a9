"""Text that needs no network: prose, code, chats, other scripts, and documents that are long."""

import sysconfig
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from itertools import chain
from pathlib import Path

from calib.data.documents import LocatedRow
from calib.errors import InputError
from calib.recipe import DataRecipe

BUILTIN_PREFIX = "builtin:"
PYTHON_DOCS = "builtin:python-docs"
LONG = "builtin:long"
# the Python documentation has about 4; a third more so that nearly every piece fills a sample
CHARACTERS_PER_TOKEN = 6
# fewer than most tokenizers need for one of these scripts, whose texts are short
SCRIPT_CHARACTERS_PER_TOKEN = 2
# characters in a document of LONG: enough for four times a sample's usual length
LONG_CHARACTERS = 4 * DataRecipe.model_fields["seq_len"].default * CHARACTERS_PER_TOKEN


def builtin_rows(dataset: str, seq_len: int) -> list[LocatedRow]:
    """Rows of a built-in dataset, cut so that each can fill `seq_len` tokens."""
    check_builtin(dataset)
    return BUILTIN[dataset](seq_len)


def check_builtin(dataset: str) -> None:
    """Refuse a name that no built-in dataset has."""
    if dataset not in BUILTIN:
        raise InputError(f"no built-in dataset '{dataset}'; built in: {', '.join(BUILTIN)}")


def _python_docs(seq_len: int) -> list[LocatedRow]:
    return _numbered(_pieces(_documentation(), seq_len * CHARACTERS_PER_TOKEN))


def _long(seq_len: int) -> list[LocatedRow]:
    enough = max(LONG_CHARACTERS, seq_len * CHARACTERS_PER_TOKEN)
    return _numbered(_pieces(_documentation(), enough))


def _code(seq_len: int) -> list[LocatedRow]:
    directory = Path(sysconfig.get_path("stdlib"))
    files = sorted(directory.glob("*.py"))
    if not files:
        raise InputError(
            f"dataset 'builtin:code' is the source of Python's standard library, and '{directory}' "
            "has no .py file; use another dataset"
        )
    text = "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return _numbered(_pieces(text, seq_len * CHARACTERS_PER_TOKEN))


def _chat(seq_len: int) -> list[LocatedRow]:
    """Chats of two turns about one topic each; the answers are parts of what is written on it."""
    enough = seq_len * CHARACTERS_PER_TOKEN
    return [
        (f"chat {number} on {name}", {"messages": _messages(name, piece)})
        for name, text in _topics()
        for number, piece in enumerate(_pieces(text, enough), 1)
        if "\n\n" in piece.strip()  # one paragraph makes no two answers
    ]


def _messages(name: str, piece: str) -> list[dict[str, str]]:
    paragraphs = piece.strip().split("\n\n")
    middle = (len(paragraphs) + 1) // 2
    turns = (
        ("user", f"What does Python's reference say about {name}? Tell me in parts."),
        ("assistant", "\n\n".join(paragraphs[:middle])),
        ("user", "Thank you. Please go on from there."),
        ("assistant", "\n\n".join(paragraphs[middle:])),
    )
    return [{"role": role, "content": content} for role, content in turns]


def _script(seq_len: int) -> list[LocatedRow]:
    folder = resources.files("calib.data").joinpath("script")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    texts = (file.read_text(encoding="utf-8") for file in files if file.name.endswith(".txt"))
    enough = seq_len * SCRIPT_CHARACTERS_PER_TOKEN
    return _numbered(chain.from_iterable(_pieces(text, enough) for text in texts))


# datasets by name: their rows for samples of so many tokens
BUILTIN: Mapping[str, Callable[[int], list[LocatedRow]]] = {
    PYTHON_DOCS: _python_docs,
    "builtin:code": _code,
    "builtin:chat": _chat,
    "builtin:script": _script,
    LONG: _long,
}


def _topics() -> list[tuple[str, str]]:
    from pydoc_data.topics import topics

    return sorted(topics.items())


def _documentation() -> str:
    return "\n\n".join(text for _, text in _topics())


def _pieces(text: str, min_characters: int) -> list[str]:
    """Whole paragraphs, of so many characters together; a shorter rest only if it is all."""
    pieces: list[str] = []
    current: list[str] = []
    length = 0
    for paragraph in text.split("\n\n"):
        current.append(paragraph)
        length += len(paragraph) + len("\n\n")
        if length >= min_characters:
            pieces.append("\n\n".join(current))
            current, length = [], 0
    # what is left is too short for a sample, unless it is all there is
    return pieces or ["\n\n".join(current)]


def _numbered(pieces: Iterable[str]) -> list[LocatedRow]:
    return [(f"piece {number}", piece) for number, piece in enumerate(pieces, 1)]
