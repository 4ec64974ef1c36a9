"""Rows of local files, each read only when it is asked for, so that files may exceed memory."""

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from calib.data.documents import Row
from calib.errors import InputError

# rows are picked at random, and pandas writes a whole file as one row group
CACHED_ROW_GROUPS = 16


class Rows(Protocol):
    """What a list of rows and a file have in common."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: int, /) -> Row:
        """Return one row, from 0."""


def looks_local(dataset: str) -> bool:
    """Whether `dataset` names a path rather than a dataset on the Hub."""
    if dataset.startswith(("./", "../", "/", "~")):
        return True
    return Path(dataset).suffix.lower() in READERS or Path(dataset).exists()


def open_rows(dataset: str) -> Rows:
    """Open a file, or every readable file of a directory in order of name.

    Raises:
        InputError: the path is missing, has an unsupported extension or cannot be read.
    """
    path = Path(dataset).expanduser()
    known = ", ".join(READERS)
    if not path.exists():
        raise InputError(f"no file or directory '{dataset}'; give a {known} file or a Hub dataset")
    if path.is_file() and path.suffix.lower() not in READERS:
        raise InputError(f"'{dataset}' has an unsupported extension; supported: {known}")
    files = [path] if path.is_file() else sorted(path.iterdir())
    readable = [file for file in files if file.is_file() and file.suffix.lower() in READERS]
    if not readable:
        raise InputError(f"directory '{dataset}' has no {known} file directly in it")
    return _Concatenated([_open(file) for file in readable])


class _Concatenated:
    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int, /) -> Row:
        part = bisect_right(self._ends, index)
        start = self._ends[part - 1] if part else 0
        return self._parts[part][index - start]


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("q")
        self._numbers = array("q")
        start = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._starts.append(start)
                    self._numbers.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int, /) -> Row:
        with self._path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.readline()
        where = f"{self._path}, line {self._numbers[index]}"
        try:
            return _row(json.loads(line.decode("utf-8-sig")), where)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{where}: not valid JSON ({error}); fix or remove the line") from None


class _Parquet:
    def __init__(self, path: Path) -> None:
        from pyarrow import parquet  # type: ignore[import-untyped]

        self._path = path
        with _parquet_errors(path):
            file = parquet.ParquetFile(path)
        groups = range(file.num_row_groups)
        self._ends = list(accumulate(file.metadata.row_group(i).num_rows for i in groups))
        self._read_group = lru_cache(CACHED_ROW_GROUPS)(file.read_row_group)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int, /) -> Row:
        group = bisect_right(self._ends, index)
        start = self._ends[group - 1] if group else 0
        with _parquet_errors(self._path):
            table = self._read_group(group)
        row: Row = table.slice(index - start, 1).to_pylist()[0]
        return row


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        message = " ".join(str(error).split())
        raise InputError(f"{path}: not a readable Parquet file ({message})") from None


def _read_json(path: Path) -> Rows:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        # a .json file often holds JSON lines: the first value is complete, then comes another
        if error.msg == "Extra data":
            return _JsonLines(path)
        raise InputError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from None
    rows = value if isinstance(value, list) else [value]
    return [_row(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def _row(value: Any, where: str) -> Row:
    if isinstance(value, str | dict):
        return value
    raise InputError(f"{where}: expected an object or a string, got {type(value).__name__}")


def _read_text(path: Path) -> Rows:
    return [path.read_text(encoding="utf-8-sig")]


def _open(path: Path) -> Rows:
    try:
        return READERS[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); convert it first") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _JsonLines,
    ".json": _read_json,
    ".parquet": _Parquet,
    ".txt": _read_text,
}
