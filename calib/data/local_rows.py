"""Rows of local files, each read only when it is asked for, so that files may exceed memory."""

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset

from calib.data.documents import LocatedRow, Row
from calib.errors import InputError
from calib.files.strict_json import regular_size

Rows = ConcatDataset[LocatedRow] | list[LocatedRow]

# rows are picked at random, and pandas writes a whole file as one row group
CACHED_ROW_GROUPS = 16


def looks_local(dataset: str) -> bool:
    """Whether `dataset` names a path rather than a dataset on the Hub."""
    if dataset.startswith(("./", "../", "/", "~")):
        return True
    return Path(dataset).suffix.lower() in READERS or Path(dataset).exists()


def open_rows(dataset: str) -> Rows:
    """Open a file, or every readable file of a directory in order of name."""
    return ConcatDataset([_open(file) for file in check_path(dataset)])


def check_path(dataset: str) -> list[Path]:
    """The readable files that `dataset` names, in order of name; InputError if there are none."""
    path = Path(dataset).expanduser()
    known = ", ".join(READERS)
    if not dataset:
        raise InputError(f"the dataset's name is empty; give a {known} file or a Hub dataset")
    if not path.exists():
        raise InputError(f"no file or directory '{dataset}'; give a {known} file or a Hub dataset")
    if path.is_file() and path.suffix.lower() not in READERS:
        raise InputError(f"'{dataset}' has an unsupported extension; supported: {known}")
    files = [path] if path.is_file() else sorted(path.iterdir())
    readable = [file for file in files if _is_readable(file)]
    if not readable:
        raise InputError(f"directory '{dataset}' has no {known} file directly in it")
    return readable


def unread_files(dataset: str) -> list[str]:
    """Names of what is in the directory `dataset` and not read, hidden files left out."""
    path = Path(dataset).expanduser()
    files = sorted(path.iterdir()) if path.is_dir() else []
    return [f.name for f in files if not (_is_readable(f) or f.name.startswith("."))]


def _is_readable(file: Path) -> bool:
    return file.is_file() and file.suffix.lower() in READERS


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

    def __getitem__(self, index: int, /) -> LocatedRow:
        with self._path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.readline()
        where = f"{self._path}, line {self._numbers[index]}"
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except (RecursionError, ValueError) as error:
            raise _bad_json(where, error) from None
        return where, _row(value, where)


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

    def __getitem__(self, index: int, /) -> LocatedRow:
        group = bisect_right(self._ends, index)
        start = self._ends[group - 1] if group else 0
        with _parquet_errors(self._path):
            table = self._read_group(group)
        where = f"{self._path}, row {index + 1}"
        try:
            return where, table.slice(index - start, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: not UTF-8 text ({error.reason})") from None


def _bad_json(where: str, error: RecursionError | ValueError) -> InputError:
    problem = "nested too deeply"
    if isinstance(error, ValueError):  # no JSON, no UTF-8, or a number longer than Python reads
        problem = f"not valid JSON ({str(error).partition(';')[0]})"
    return InputError(f"{where}: {problem}; fix or remove the line")


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        message = " ".join(str(error).split())
        raise InputError(f"{path}: not a readable Parquet file ({message})") from None


def _read_json(path: Path) -> _JsonLines | list[LocatedRow]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        # a .json file often holds JSON lines: the first value is complete, then comes another
        if error.msg == "Extra data":
            return _JsonLines(path)
        raise InputError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from None
    except (RecursionError, ValueError) as error:
        raise _bad_json(str(path), error) from None
    rows = value if isinstance(value, list) else [value]
    places = [f"{path}, row {number}" for number in range(1, len(rows) + 1)]
    return [(where, _row(row, where)) for where, row in zip(places, rows, strict=True)]


def _row(value: Any, where: str) -> Row:
    if isinstance(value, str | dict):
        return value
    raise InputError(f"{where}: expected an object or a string, got {type(value).__name__}")


def _open(path: Path) -> Any:
    regular_size(path)
    try:
        return READERS[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); convert it first") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


# each gives a sequence of `LocatedRow`
READERS: dict[str, Callable[[Path], Any]] = {
    ".jsonl": _JsonLines,
    ".json": _read_json,
    ".parquet": _Parquet,
    ".txt": lambda path: [(str(path), path.read_text(encoding="utf-8-sig"))],
}
