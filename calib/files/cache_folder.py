"""Folders that libraries keep their caches in: which variable moves the one that cannot be used."""

import errno
import os
from pathlib import Path

# a folder that may not be written, is none, or is full
_REFUSALS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENOSPC, errno.EDQUOT),
)


def cache_refusal(error: BaseException | None, variable: str = "") -> str | None:
    """Say which cache an error comes from and which variable moves it; None if from no cache.

    An error that names no file, as that of a full disk, is of the cache of `variable`, if given.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            name = _variable(Path(os.fsdecode(error.filename))) if error.filename else variable
            if name:
                place = error.filename or _folders()[name]
                return (
                    f"the cache '{place}' cannot be used ({error.strerror}); "
                    f"set {name} to a folder that you can write"
                )
        error = error.__cause__ or error.__context__
    return None


def _variable(path: Path) -> str:
    """The variable, one that is set first, of a folder around `path`, or to be made in `path`."""
    folders = _folders()
    around = [name for name, folder in folders.items() if path.is_relative_to(folder)]
    names = around or [name for name, folder in folders.items() if folder.is_relative_to(path)]
    return next((name for name in names if os.environ.get(name)), "".join(names[:1]))


def _folders() -> dict[str, Path]:
    """By variable, a folder within another one first."""
    caches = _folder("XDG_CACHE_HOME", Path.home() / ".cache")
    hugging_face = _folder("HF_HOME", caches / "huggingface")
    return {
        "HF_HUB_CACHE": _folder("HF_HUB_CACHE", hugging_face / "hub"),
        "HF_DATASETS_CACHE": _folder("HF_DATASETS_CACHE", hugging_face / "datasets"),
        "HF_MODULES_CACHE": _folder("HF_MODULES_CACHE", hugging_face / "modules"),
        "HF_HOME": hugging_face,
        "TRITON_CACHE_DIR": _folder("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"),
        "XDG_CACHE_HOME": caches,
    }


def _folder(variable: str, default: Path) -> Path:
    return Path(os.environ.get(variable) or default).expanduser().absolute()
