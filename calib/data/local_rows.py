"""Rows of local files, each read only when it is asked for, so that files may exceed memory."""

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from torch.utils.data import ConcatDataset

from calib.arguments import to_path
from calib.data.samples import LocatedRow
from calib.errors import InputError, one_line
from calib.files.strict_json import regular_size

# rows are picked at random, and pandas writes a whole file as one row group
CACHED_ROW_GROUPS = 16


def looks_local(dataset: str) -> bool:
    """Return whether `dataset` names a path rather than a dataset on the Hub."""
    is_path = dataset.startswith(("./", "../", "/", "~"))
    return is_path or Path(dataset).suffix.lower() in READERS or Path(dataset).exists()


def open_rows(dataset: str) -> ConcatDataset[LocatedRow]:
    """Open a file, or every readable file of a directory in order of name."""
    files = list[Any]()
    for path in find_files(dataset)[0]:
        regular_size(path)
        with _errors_explained(str(path)):
            files.append(READERS[path.suffix.lower()](path))
    return ConcatDataset(files)


def find_files(dataset: str) -> tuple[list[Path], list[str]]:
    """Return the readable files that `dataset` names, and the names of a directory's other files.

    Both are in order of name. Hidden files are not listed. An InputError if no file is readable.
    """
    suffixes = ", ".join(READERS)
    if not dataset:
        raise InputError(f"the dataset's name is empty; give a {suffixes} file or a Hub dataset")
    path = to_path(dataset)
    if not path.exists():
        raise InputError(f"no file or directory '{dataset}'; give a {suffixes} file or a Hub dataset")
    if path.is_file() and path.suffix.lower() not in READERS:
        raise InputError(f"'{dataset}' has an unsupported extension; supported: {suffixes}")
    files = [path] if path.is_file() else sorted(path.iterdir())
    readable = [file for file in files if file.is_file() and file.suffix.lower() in READERS]
    if not readable:
        raise InputError(f"directory '{dataset}' has no {suffixes} file directly in it")
    read = {*readable}
    return readable, [f.name for f in files if f not in read and not f.name.startswith(".")]


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._path, self._starts, self._numbers = path, array("q"), array("q")
        start = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._starts.append(start)
                    self._numbers.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int, /) -> LocatedRow:
        with _errors_explained(str(self._path)), self._path.open("rb") as file:
            try:
                return self._read(file, index)
            except InputError:
                for earlier in range(index):  # rows are read in a random order, and the first bad one is told
                    self._read(file, earlier)
                raise

    def _read(self, file: BinaryIO, index: int) -> LocatedRow:
        where = f"{self._path}, line {self._numbers[index]}"
        with _errors_explained(where):
            file.seek(self._starts[index])
            line = file.readline().decode("utf-8-sig").rstrip("\r\n")
            return _located(where, json.loads(line))


def _read_json(path: Path) -> _JsonLines | list[LocatedRow]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        # a .json file often holds JSON lines: the first line is a whole value, then comes another
        first = error.doc[: error.pos].strip()
        if error.msg == "Extra data" and "\n" not in first and not first.startswith("["):
            return _JsonLines(path)
        raise InputError(_json_problem(f"{path}, line {error.lineno}", error)) from None
    rows = value if isinstance(value, list) else [value]
    return [_located(f"{path}, row {number}", row) for number, row in enumerate(rows, 1)]


def _json_problem(where: str, error: json.JSONDecodeError) -> str:
    return f"{where}, column {error.colno}: not valid JSON ({error.msg}); fix or remove it"


def _located(where: str, value: Any) -> LocatedRow:
    if isinstance(value, str | dict):
        return where, value
    raise InputError(f"{where}: expected an object or a string, got {type(value).__name__}")


class _Parquet:
    def __init__(self, path: Path) -> None:
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

        with _errors_explained(str(path), ArrowException):
            file = parquet.ParquetFile(path)
            groups = range(file.num_row_groups)
            self._ends = list(accumulate(file.metadata.row_group(i).num_rows for i in groups))
        self._path, self._error = path, ArrowException
        self._read_group = lru_cache(CACHED_ROW_GROUPS)(file.read_row_group)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int, /) -> LocatedRow:
        group = bisect_right(self._ends, index)
        start = self._ends[group - 1] if group else 0
        where = f"{self._path}, row {index + 1}"
        with _errors_explained(where, self._error):
            return where, self._read_group(group).slice(index - start, 1).to_pylist()[0]


# each returns a sequence of `LocatedRow`
READERS: dict[str, Callable[[Path], Any]] = {
    ".jsonl": _JsonLines,
    ".json": _read_json,
    ".parquet": _Parquet,
    ".txt": lambda path: [(str(path), path.read_text(encoding="utf-8-sig"))],
}


@contextmanager
def _errors_explained(where: str, *library_errors: type[Exception]) -> Iterator[None]:
    """Turn what goes wrong in the file or row `where` into an InputError."""
    unreadable: tuple[type[Exception], ...] = (OSError, ValueError, *library_errors)
    try:
        yield
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"{where}: nested too deeply; fix or remove it") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text (byte {error.start}); convert it first") from None
    except json.JSONDecodeError as error:
        raise InputError(_json_problem(where, error)) from None
    except unreadable as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"{where}: cannot be read ({reason}); fix or remove it") from None
