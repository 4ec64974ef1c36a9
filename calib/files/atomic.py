"""Directories that appear whole or not at all, each written by one run at a time."""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from calib.errors import InputError
from calib.progress import WRITTEN

_ANOTHER = "choose another output"
_EXCHANGE = 2  # RENAME_EXCHANGE
# file systems without locks; there the last rename finds what another run wrote
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Claim:
    """The right of one run to write an output directory."""

    path: Path  # without symbolic links
    replaces: tuple[int, int] | None  # device and inode of the directory that may go, if any
    way_out: str  # what to do where it cannot be written


@contextmanager
def claimed(
    out: Path, *, overwrite: bool = False, wait: bool = False, way_out: str = _ANOTHER
) -> Iterator[Claim]:
    """Keep other runs from writing the directory `out` while the block runs.

    With `overwrite` the directory that is there now may be replaced. Another run that writes it is
    an InputError, or is waited for with `wait`. `way_out` is advice where it cannot be written.
    """
    path, missing = Path(os.path.realpath(out)), []
    lock = path.with_name(f".{path.name}.lock")
    try:
        if (out.is_symlink() or path.exists()) and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file, or a link to nothing")
        missing = [parent for parent in path.parents if not parent.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise InputError(f"another run is writing '{out}'; wait for it, or {way_out}") from None
    except OSError as error:
        raise InputError(f"cannot write '{out}': {error.strerror}; {way_out}") from None
    try:
        _remove_abandoned(path)
        yield Claim(path, _identity(path) if overwrite else None, way_out)
    finally:
        with suppress(OSError):
            lock.unlink(missing_ok=True)
            for parent in missing:
                parent.rmdir()  # where nothing was written
        os.close(descriptor)


def _locked(lock: Path, operation: int) -> int:
    while True:
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(descriptor, operation)
            # its last holder may have removed the file between our two calls
            if _identity(lock) == _identity(descriptor):
                return descriptor
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)


def _identity(file: Path | int) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def atomic_directory(out: Path, *, overwrite: bool = False, claim: Claim | None = None) -> Iterator[Path]:
    """Give a scratch directory that becomes `out` when the block ends well, and is gone otherwise.

    `out` is absent, or empty, or replaced with `overwrite`; a `claim` on it, made before, says what
    may be replaced. InputError if it cannot be written, or another run has written it meanwhile.
    """
    with nullcontext(claim) if claim else claimed(out, overwrite=overwrite) as mine:
        process = f"{socket.gethostname()}-{os.getpid()}"
        scratch = mine.path.with_name(f".{mine.path.name}.{process}.partial")
        try:
            scratch.mkdir()
            yield scratch
            _put(scratch, mine, out)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"cannot write '{out}': {error}; nothing was left behind; {mine.way_out}"
            ) from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    WRITTEN.append(out)


def _put(scratch: Path, claim: Claim, out: Path) -> None:
    changed = InputError(f"'{out}' was written by another program meanwhile; nothing was replaced")
    if claim.replaces is not None and claim.path.exists():
        if not _overwrite(scratch, claim):
            raise changed
        return
    try:
        scratch.rename(claim.path)  # takes the place of an empty directory, never of another
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise changed from None
        raise


def _overwrite(scratch: Path, claim: Claim) -> bool:
    """Replace the claimed directory; False, changing nothing, if another one is there by now."""
    path, old = claim.path, scratch.with_suffix(".old")
    if _exchange(scratch, path):
        known = _identity(scratch) == claim.replaces
        return known or not _exchange(scratch, path)
    path.rename(old)
    known = _identity(old) == claim.replaces
    try:
        (scratch if known else old).rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return known


def _exchange(first: Path, second: Path) -> bool:
    """Swap the names of two directories in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here = -100  # AT_FDCWD: relative to the working directory
    return bool(rename and rename(here, bytes(first), here, bytes(second), _EXCHANGE) == 0)


def _remove_abandoned(out: Path) -> None:
    """Remove scratch directories of `out` whose process, of this machine, is no more."""
    name = re.escape(f".{out.name}.{socket.gethostname()}-") + r"(\d+)\.(?:partial|old)"
    for path in out.parent.iterdir():
        match = re.fullmatch(name, path.name)
        if match and not psutil.pid_exists(int(match[1])):
            if path.suffix == ".old" and not out.exists():
                path.rename(out)  # its process ended between two renames
            shutil.rmtree(path, ignore_errors=True)


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with the permissions that any new file gets.

    With those of safetensors 0.8 a server that runs as another user could not read it. Tensors are
    copied: it refuses shared memory, and layers that share a cache share their scales.
    """
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, path, metadata)
    share_file(path)


def share_file(path: Path) -> None:
    """Give `path` the permissions of a new file."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)
