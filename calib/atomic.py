"""Directories that appear whole or not at all."""

import ctypes
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from calib.errors import InputError

_RELATIVE_TO_WORKING_DIRECTORY = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Give a scratch directory that becomes `out` when the block ends well, and is gone otherwise.

    What a killed process left behind goes with the next one that writes `out`.

    Raises:
        InputError: the file system refuses to write, as on a full disk.
    """
    scratch = out.parent / f".{out.name}.{socket.gethostname()}-{os.getpid()}.partial"
    try:
        scratch.mkdir(parents=True)
        _remove_abandoned(out)
        yield scratch
        _replace(scratch, out)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write '{out}': {error}; nothing was left behind") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _replace(scratch: Path, out: Path) -> None:
    if not out.exists():
        scratch.rename(out)
    elif not _exchange(scratch, out):
        old = scratch.with_suffix(".old")
        out.rename(old)
        scratch.rename(out)
        shutil.rmtree(old)


def _exchange(first: Path, second: Path) -> bool:
    """Swap the names of two directories in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here = _RELATIVE_TO_WORKING_DIRECTORY
    return bool(rename and rename(here, bytes(first), here, bytes(second), _EXCHANGE) == 0)


def _remove_abandoned(out: Path) -> None:
    """Remove scratch directories of `out` whose process, of this machine, is no more."""
    name = re.escape(f".{out.name}.{socket.gethostname()}-") + r"(\d+)\.(?:partial|old)"
    for path in out.parent.iterdir():
        match = re.fullmatch(name, path.name)
        if match and not _is_running(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
