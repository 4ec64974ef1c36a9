"""Built-in data, which needs no network: prose, code, chats, other scripts, long documents, pictures."""

import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path

from calib.data.samples import LocatedRow, Row
from calib.errors import InputError
from calib.recipe import DataRecipe

BUILTIN_PREFIX = "builtin:"
PYTHON_DOCS = "builtin:python-docs"
LONG = "builtin:long"
PICTURES, MORE_PICTURES = "builtin:pictures", "builtin:more-pictures"
# the Python documentation has about 4; a third more so that nearly every piece fills a sample
CHARACTERS_PER_TOKEN = 6
# fewer than most tokenizers need for one of these scripts, whose texts are short
SCRIPT_CHARACTERS_PER_TOKEN = 2
# enough for four samples of the usual length
LONG_CHARACTERS = 4 * DataRecipe.model_fields["seq_len"].default * CHARACTERS_PER_TOKEN


def builtin_rows(dataset: str, seq_len: int) -> list[LocatedRow]:
    """Return the rows of a built-in dataset, each with enough text for `seq_len` tokens."""
    check_builtin(dataset)
    return [(f"row {number}", row) for number, row in enumerate(BUILTIN[dataset](seq_len), 1)]


def check_builtin(dataset: str) -> None:
    """Refuse a name that no built-in dataset has."""
    if dataset not in BUILTIN:
        raise InputError(f"no built-in dataset '{dataset}'; built in: {', '.join(BUILTIN)}")


def _topics() -> list[tuple[str, str]]:
    from pydoc_data.topics import topics

    return sorted(topics.items())


def _documentation(characters: int) -> list[str]:
    return _cut("\n\n".join(text for _, text in _topics()), characters)


def _code(seq_len: int) -> list[str]:
    directory = Path(sysconfig.get_path("stdlib"))
    files = sorted(directory.glob("*.py"))
    if not files:
        raise InputError(
            f"dataset 'builtin:code' is the source of Python's standard library, and '{directory}' "
            "has no .py file; use another dataset"
        )
    text = "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return _cut(text, seq_len * CHARACTERS_PER_TOKEN)


def _chats(seq_len: int) -> Iterator[Row]:
    """Yield chats of two questions about a topic; the halves of a piece of its text answer them."""
    for name, text in _topics():
        for piece in _cut(text, seq_len * CHARACTERS_PER_TOKEN):
            paragraphs = piece.strip().split("\n\n")
            middle = (len(paragraphs) + 1) // 2
            turns = (
                ("user", f"What does Python's reference say about {name}? Tell me in parts."),
                ("assistant", "\n\n".join(paragraphs[:middle])),
                ("user", "Thank you. Please go on from there."),
                ("assistant", "\n\n".join(paragraphs[middle:])),
            )
            if len(paragraphs) > 1:
                yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def _scripts(seq_len: int) -> Iterator[str]:
    folder = resources.files("calib.data").joinpath("script")
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".txt"):
            yield from _cut(file.read_text(encoding="utf-8"), seq_len * SCRIPT_CHARACTERS_PER_TOKEN)


def _pictures(numbers: range, seq_len: int) -> Iterator[Row]:
    from calib.data.builtin_pictures import picture_rows

    return picture_rows(_documentation(seq_len * CHARACTERS_PER_TOKEN), numbers)


# rows of each dataset, for samples of so many tokens
BUILTIN: dict[str, Callable[[int], Iterable[Row]]] = {
    PYTHON_DOCS: lambda seq_len: _documentation(seq_len * CHARACTERS_PER_TOKEN),
    "builtin:code": _code,
    "builtin:chat": _chats,
    "builtin:script": _scripts,
    PICTURES: partial(_pictures, range(32)),
    MORE_PICTURES: partial(_pictures, range(32, 64)),
    LONG: lambda seq_len: _documentation(max(LONG_CHARACTERS, seq_len * CHARACTERS_PER_TOKEN)),
}


def _cut(text: str, characters: int) -> list[str]:
    """Cut `text` into whole paragraphs of at least so many characters together, without the end."""
    pieces, paragraphs, length = list[str](), list[str](), 0
    for paragraph in text.split("\n\n"):
        paragraphs.append(paragraph)
        length += len(paragraph) + len("\n\n")
        if length >= characters:
            pieces.append("\n\n".join(paragraphs))
            paragraphs, length = [], 0
    return pieces or [text]
