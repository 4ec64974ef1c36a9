"""Folders that libraries keep their caches in, and the environment variables that move them.

A module of its own, because models, data and commands use it, which share nothing else of files.
"""

import os
from errno import EACCES, EDQUOT, EEXIST, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path

# variable -> the one that moves the folder around its default, if any, and that default
_DEFAULTS = {
    "HF_HUB_CACHE": ("HF_HOME", "hub"),
    "HF_DATASETS_CACHE": ("HF_HOME", "datasets"),
    "HF_MODULES_CACHE": ("HF_HOME", "modules"),
    "HF_HOME": ("XDG_CACHE_HOME", "huggingface"),
    "TRITON_CACHE_DIR": ("", "~/.triton/cache"),
    "XDG_CACHE_HOME": ("", "~/.cache"),
}
# errors of a folder that may not be written, is not a folder, or is full
_REFUSALS = (EACCES, EPERM, EROFS, ENOTDIR, EEXIST, ENOSPC, EDQUOT)


def cache_folder(variable: str) -> Path:
    """Return the folder that an environment variable names, or its default."""
    parent, default = _DEFAULTS[variable]
    if parent and not os.environ.get(variable):
        return cache_folder(parent) / default
    # as the libraries do, whose folder `~nobody` is one of that name
    return Path(os.path.expanduser(os.environ.get(variable) or default)).absolute()


def cache_refusal(error: BaseException | None, variable: str = "") -> str | None:
    """Say which cache an error comes from and which variable moves it; None if it comes from none.

    An error that names no file, as that of a full disk, is of the cache of `variable`, if that is given.
    """
    visited = set[int]()  # causes can form a circle
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            names = [variable] if variable else []
            if error.filename:
                path, folders = Path(os.fsdecode(error.filename)), {x: cache_folder(x) for x in _DEFAULTS}
                around = [name for name, folder in folders.items() if path.is_relative_to(folder)]
                names = around or [name for name, folder in folders.items() if folder.is_relative_to(path)]
            if names:
                name = next((name for name in names if os.environ.get(name)), names[0])
                return (
                    f"the cache '{error.filename or cache_folder(name)}' cannot be used ({error.strerror}); "
                    f"set {name} to a folder that you can write"
                )
        error = error.__cause__ or error.__context__
    return None
