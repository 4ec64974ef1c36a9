"""Output directories: each written by one run at a time, whole or not at all; weights are linked."""

import ctypes
import errno
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE
from typing import Literal

import psutil
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from calib.choices import Weights
from calib.errors import InputError
from calib.progress import WRITTEN

_ANOTHER = "choose another output"
_SOON = 0.1  # seconds in which a run that ends may still remove its lock
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # relative to the working directory; swap both names
# file systems without locks; there the last rename finds what another run wrote
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP}
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_CHUNK = 64 << 20

Placing = Weights | Literal["keep"]

# (file name, bytes copied since the last call, bytes in all)
OnCopied = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Claim:
    """The right of one run to write an output directory."""

    path: Path  # without symbolic links
    replaces: tuple[int, int] | None  # device and inode of the directory that may go, if any
    way_out: str  # advice where it cannot be written


@contextmanager
def claimed(
    out: Path, *, overwrite: bool = False, wait: bool = False, way_out: str = _ANOTHER
) -> Iterator[Claim]:
    """Keep other runs from writing the directory `out` while the block runs.

    With `overwrite` the directory that is there now may be replaced. Another run that writes it is
    an InputError, or is waited for with `wait`. `way_out` is advice where it cannot be written.
    """
    path, new_parents = Path(os.path.realpath(out)), []
    lock_file = path.with_name(f".{path.name}.lock")
    lock = FileLock(lock_file, timeout=-1 if wait else _SOON, fallback_to_soft=False)
    try:
        if (out.is_symlink() or path.exists()) and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file, or a link to nothing")
        new_parents = [parent for parent in path.parents if not parent.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        problem = f"another run is writing '{out}'; wait for it, or"
        if not lock_file.exists():
            problem = f"cannot write '{out}': no file can be made beside it;"
        raise InputError(f"{problem} {way_out}") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            is_name = isinstance(error, FileExistsError)  # of a folder that is to hold it
            reason = f"'{error.filename}' is not a folder" if is_name else error.strerror
            raise InputError(f"cannot write '{out}': {reason}; {way_out}") from None
    try:
        _remove_abandoned(path)
        yield Claim(path, _identity(path) if overwrite else None, way_out)
    finally:
        with suppress(OSError):
            lock_file.unlink(missing_ok=True)
            for parent in new_parents:
                parent.rmdir()  # where nothing was written
        lock.release()


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(FileNotFoundError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


@contextmanager
def atomic_directory(out: Path, *, overwrite: bool = False, claim: Claim | None = None) -> Iterator[Path]:
    """Yield a scratch directory that becomes `out` when the block ends well, and is gone otherwise.

    `out` is absent, or empty, or replaced with `overwrite`; a `claim` on it, made before, says which
    directory may be replaced. InputError if it cannot be written, or another run has written it meanwhile.
    """
    with nullcontext(claim) if claim else claimed(out, overwrite=overwrite) as own:
        process = f"{socket.gethostname()}-{os.getpid()}"
        scratch = own.path.with_name(f".{own.path.name}.{process}.partial")
        try:
            scratch.mkdir()
            yield scratch
            if not _put(scratch, own):
                raise InputError(f"'{out}' was written by another program meanwhile; nothing was replaced")
        except (OSError, SafetensorError) as error:
            # a full disk concerns all files, and users do not know the temporary ones
            reasons = (reason for reason in _FULL if reason in str(error))
            raise InputError(
                f"cannot write '{out}': {next(reasons, error)}; nothing was left behind; {own.way_out}"
            ) from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    WRITTEN.append(out)


def _put(scratch: Path, claim: Claim) -> bool:
    """Give `scratch` its final name; False, changing nothing, if another directory is there by now."""
    if claim.replaces is not None and claim.path.exists():
        return _replace(scratch, claim)
    try:
        scratch.rename(claim.path)  # takes the place of an empty directory, never of another
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _replace(scratch: Path, claim: Claim) -> bool:
    path, old = claim.path, scratch.with_suffix(".old")
    copy_access(path, scratch)
    if _exchange(scratch, path):
        is_claimed = _identity(scratch) == claim.replaces
        return is_claimed or not _exchange(scratch, path)
    path.rename(old)
    is_claimed = _identity(old) == claim.replaces
    try:
        (scratch if is_claimed else old).rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return is_claimed


def copy_access(source: Path, target: Path) -> None:
    """Give `target` the owner, group and permissions of `source`, as far as this process may."""
    status, mode = source.stat(), S_IMODE(source.stat().st_mode)
    for owner, group in ((status.st_uid, -1), (-1, status.st_gid)):
        with suppress(OSError):  # PermissionError, or EINVAL of an owner whom a container does not know
            os.chown(target, owner, group)
    if target.stat().st_gid != status.st_gid:  # another group gets what everybody has
        mode = (mode & ~0o2070) | (mode & 0o007) << 3
    target.chmod(mode)


def _exchange(first: Path, second: Path) -> bool:
    """Swap the names of two directories in one step; False where the system cannot.

    With two renames instead, a run that is killed between them leaves a model that was to be
    changed in place under a name that nobody looks for.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return bool(rename and rename(_AT_FDCWD, bytes(first), _AT_FDCWD, bytes(second), _RENAME_EXCHANGE) == 0)


def _remove_abandoned(out: Path) -> None:
    """Remove scratch directories of `out` whose process, of this machine, has ended."""
    pattern = re.escape(f".{out.name}.{socket.gethostname()}-") + r"(\d+)\.(?:partial|old|backup)"
    for path in out.parent.iterdir():
        match = re.fullmatch(pattern, path.name)
        if match and not psutil.pid_exists(int(match[1])):
            if path.suffix == ".old" and not out.exists():
                path.rename(out)  # its process ended between two renames
            shutil.rmtree(path, ignore_errors=True)


def place_shard(source: Path, target: Path, drop: set[str], weights: Placing, on_copied: OnCopied) -> None:
    """Put the weight file `source` at `target`, without the tensors `drop`.

    `link` shares the file where the file system can; `copy` makes it independent; `keep` links it
    as it is, a symbolic link too. `on_copied` is called with each part that had to be copied.
    """
    if drop:
        # scales of an earlier calibration: an engine would find two values for one name
        tensors, metadata = read_shard(source, drop)
        save_tensors(tensors, target, metadata)
        return
    if weights == "keep":
        os.link(source, target, follow_symlinks=False)
        return
    if weights == "link":
        try:
            os.link(source.resolve(), target)
            return
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
    size = source.stat().st_size
    with source.open("rb") as read, target.open("xb") as write:
        while count := _copy_chunk(read.fileno(), write.fileno()):
            on_copied(source.name, count, size)


def _copy_chunk(read: int, write: int) -> int:
    with suppress(OSError):
        # btrfs, XFS and bcachefs share the blocks until one of the files changes
        if count := os.copy_file_range(read, write, _CHUNK):
            return count
    return os.sendfile(write, read, None, _CHUNK)


def read_shard(path: Path, drop: Set[str] = frozenset()) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors, of any shape, of a weight file but `drop`, sorted by name, and its metadata."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in sorted({*file.keys()} - drop)}, file.metadata() or {}


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors of any shape to a safetensors file with the permissions that any new file gets.

    With those of safetensors 0.8 a server that runs as another user could not read it. Tensors are
    copied: it refuses shared memory, and layers that share a cache share their scales.
    """
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, metadata)
    share_file(path)


def share_file(path: Path) -> None:
    """Give `path` the permissions of a new file."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)
