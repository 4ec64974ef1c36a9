"""`fp8kv_pack.json`: the files of a pack with their checksums, read as those of a stranger.

The checksums tell damage. They are no signature: whoever changes all of them makes another pack.
"""

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from calib.errors import InputError
from calib.files.names import CALIBRATION_FILE, JSON_FILE, PACK_FILE, STATS_FILE
from calib.files.strict_json import json_text, parse_object, regular_size

_VERSION = 1
PACKED = "packed"  # key of a calibration's file in a pack
MAX_MANIFEST_BYTES = 1 << 20
# statistics with histograms, of a model with a hundred layers
_MAX_FILE_BYTES = 512 << 20
_NEEDED = {CALIBRATION_FILE, STATS_FILE}
FILES = (CALIBRATION_FILE, STATS_FILE, JSON_FILE)  # whatever else lies beside them is not read


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class PackedFile(_Strict):
    """What a file of the pack must be."""

    size: int = Field(ge=0, le=_MAX_FILE_BYTES)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Pack(_Strict):
    """The manifest: which files, and what the calibration's own file does not say."""

    fp8kv_pack: int = Field(ge=_VERSION, le=_VERSION)
    base_model: str | None  # its id on the Hub
    revision: str | None  # commit of that
    fingerprint: str  # of the checkpoint that was measured
    evaluation: dict[str, Any] | None
    files: dict[str, PackedFile]
    sha256: str  # of all before

    @field_validator("files")
    @classmethod
    def _are_those_of_a_pack(cls, files: dict[str, PackedFile]) -> dict[str, PackedFile]:
        if strange := sorted(files.keys() - {*FILES}):
            raise ValueError(f"'{strange[0][:80]}' is no file of a pack")
        if missing := sorted(_NEEDED - files.keys()):
            raise ValueError(f"{missing[0]} is missing")
        return files


def read_pack(directory: Path) -> Pack | None:
    """The manifest in `directory`, or None without one; InputError unless every file fits it."""
    if not (directory / PACK_FILE).exists():
        return None
    pack = read_manifest(directory / PACK_FILE)
    for name in FILES:
        path, known = directory / name, pack.files.get(name)
        if known is not None:
            _check(path, known)
        elif path.exists():
            raise _damaged(path, f"{PACK_FILE} does not name it")
    return pack


def read_manifest(path: Path) -> Pack:
    """Read a manifest alone; InputError where it is damaged, or of a newer version."""
    size = regular_size(path)
    if size > MAX_MANIFEST_BYTES:
        raise InputError(f"'{path}' has {size:,} bytes; no pack has {MAX_MANIFEST_BYTES:,}")
    text = _bytes(path)
    document = parse_object(text, f"'{path}'")
    version = document.get("fp8kv_pack")
    if type(version) is int and version > _VERSION:
        raise InputError(
            f"'{path}' is of a newer version of packs than this fp8kv reads, {_VERSION}; install a "
            "newer fp8kv"
        )
    if text != _text(document):
        raise _damaged(path, "it is not as fp8kv pack wrote it")
    try:
        return Pack.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part)[:80] for part in first["loc"])
        raise _damaged(path, f"{at}: {first['msg'].removeprefix('Value error, ')}") from None


def write_manifest(path: Path, about: dict[str, Any]) -> Pack:
    """Write a manifest of the files beside it, with what it says `about` the model."""
    held = [path.with_name(name) for name in FILES if path.with_name(name).exists()]
    files = {file.name: {"size": file.stat().st_size, "sha256": _digest(file)} for file in held}
    path.write_bytes(_text({"fp8kv_pack": _VERSION, **about, "files": files}))
    return read_manifest(path)


def _text(document: dict[str, Any]) -> bytes:
    """`document` as the text of a manifest, which ends with the checksum of the rest."""
    body = {key: value for key, value in document.items() if key != "sha256"}
    return _dump(body | {"sha256": hashlib.sha256(_dump(body)).hexdigest()})


def _check(path: Path, known: PackedFile) -> None:
    size = regular_size(path)
    if size != known.size:
        raise _damaged(path, f"{size:,} bytes instead of {known.size:,}")
    if _digest(path) != known.sha256:
        raise _damaged(path, "its checksum differs")


def _digest(path: Path) -> str:
    return hashlib.sha256(_bytes(path)).hexdigest()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from None


def _dump(document: dict[str, Any]) -> bytes:
    return (json_text(document, indent=2) + "\n").encode()


def _damaged(path: Path, problem: str) -> InputError:
    return InputError(f"'{path}' is damaged or changed ({problem}); get the pack again")
