"""Weight files of the source in an output: linked where possible, or cloned, or copied."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from safetensors import safe_open

from calib.choices import Weights
from calib.files.atomic import save_tensors

_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP}
_CLONE = 0x40049409  # FICLONE: btrfs, XFS and bcachefs share the blocks until one file changes
_CHUNK = 64 << 20

Placing = Weights | Literal["keep"]

# (file name, bytes copied since the last call, bytes in all)
OnCopied = Callable[[str, int, int], None]


def place_shard(source: Path, target: Path, drop: set[str], weights: Placing, on_copied: OnCopied) -> None:
    """Put the weight file `source` at `target`, without the tensors `drop`.

    `link` shares the file where the file system can; `copy` makes it independent; `keep` links it
    as it is, a symbolic link too. `on_copied` is called with each part that had to be copied.
    """
    if drop:
        # scales of an earlier calibration: an engine would find two values for one name
        with safe_open(source, framework="pt") as file:
            names = sorted(set(file.keys()) - drop)
            kept = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata()
        save_tensors(kept, target, metadata or {})
    elif weights == "keep":
        os.link(source, target, follow_symlinks=False)
    elif not (weights == "link" and _link(source, target)) and not _clone(source, target):
        _copy(source, target, on_copied)


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def _clone(source: Path, target: Path) -> bool:
    try:
        with source.open("rb") as read, target.open("xb") as written:
            fcntl.ioctl(written.fileno(), _CLONE, read.fileno())
    except OSError:
        # other file systems, and other devices
        target.unlink(missing_ok=True)
        return False
    return True


def _copy(source: Path, target: Path, on_copied: OnCopied) -> None:
    size, copied = source.stat().st_size, 0
    with source.open("rb") as read, target.open("xb") as written:
        while sent := os.sendfile(written.fileno(), read.fileno(), copied, _CHUNK):
            copied += sent
            on_copied(source.name, sent, size)
