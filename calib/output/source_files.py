"""A source's own files that an output replaces, kept in the output so that they can be given back.

They lie in a directory below the output's, where no engine looks.
"""

import shutil
from pathlib import Path

from calib.scalefiles.file_names import (
    CARD_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    SCALES_SHARD,
    SOURCE_DIRECTORY,
)

_REPLACED = (CARD_FILE, CONFIG_FILE, INDEX_FILE)


def source_files(path: Path) -> Path | None:
    """The directory with the files as they were before fp8kv: `path`, or what it keeps.

    None: `path` is an output of ours that has kept nothing, as older versions made.
    """
    kept = path / SOURCE_DIRECTORY
    if kept.is_dir():
        return kept
    return None if (path / SCALES_SHARD).exists() else path


def keep_source_files(path: Path, out: Path) -> None:
    """Copy into `out` what it replaces of the source `path`, or what `path` has kept itself."""
    if source := source_files(path):
        kept = out / SOURCE_DIRECTORY
        kept.mkdir()
        for name in _REPLACED:
            if (source / name).is_file():
                shutil.copyfile(source / name, kept / name)
