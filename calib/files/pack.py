"""The manifest of a pack, `fp8kv_pack.json`: its files with their checksums, read as those of a stranger.

The checksums tell damage. They are not a signature: whoever changes all of them makes another pack.
"""

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from calib.errors import InputError, first_problem
from calib.files.names import CALIBRATION_FILE, JSON_FILE, PACK_FILE, STATS_FILE
from calib.files.strict_json import json_text, parse_object, read_bytes, regular_size

_VERSION = 1
PACKED = "packed"  # key of a calibration's report in a pack
_MANIFEST_BYTES = 1 << 20
_FILE_BYTES = 512 << 20  # statistics with histograms, of a model with a hundred layers
FILES = (CALIBRATION_FILE, STATS_FILE, JSON_FILE)  # all that is read; only the last is optional
LARGEST_FILES = {PACK_FILE: _MANIFEST_BYTES, **dict.fromkeys(FILES, _FILE_BYTES)}


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class PackedFile(_StrictModel):
    """The size and checksum of a file of the pack."""

    size: int = Field(ge=0, le=_FILE_BYTES)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Pack(_StrictModel):
    """The manifest: the files, and what the calibration's report does not say."""

    fp8kv_pack: int = Field(ge=_VERSION, le=_VERSION)
    base_model: str | None  # its id on the Hub
    revision: str | None  # commit of that
    fingerprint: str  # of the model that was measured
    evaluation: dict[str, Any] | None
    files: dict[str, PackedFile]
    sha256: str  # of all before

    @field_validator("files")
    @classmethod
    def _check_names(cls, files: dict[str, PackedFile]) -> dict[str, PackedFile]:
        if strange := sorted(files.keys() - {*FILES}):
            raise ValueError(f"'{strange[0][:80]}' is not a file of a pack")
        if missing := sorted({CALIBRATION_FILE, STATS_FILE} - files.keys()):
            raise ValueError(f"{missing[0]} is missing")
        return files


def read_pack(directory: Path) -> Pack | None:
    """Read the manifest in `directory`, if any; raise an InputError unless every file fits it."""
    if not (directory / PACK_FILE).exists():
        return None
    pack = _read_manifest(directory / PACK_FILE)
    for path in (directory / name for name in FILES):
        file, problem = pack.files.get(path.name), None
        if file is None:
            problem = f"{PACK_FILE} does not name it" if path.exists() else None
        elif (size := regular_size(path)) != file.size:
            problem = f"{size:,} bytes instead of {file.size:,}"
        elif _sha256(read_bytes(path)) != file.sha256:
            problem = "its checksum differs"
        if problem:
            raise _damaged(path, problem)
    return pack


def _read_manifest(path: Path) -> Pack:
    if (size := regular_size(path)) > _MANIFEST_BYTES:
        raise InputError(f"'{path}' has {size:,} bytes; no pack has {_MANIFEST_BYTES:,}")
    text = read_bytes(path)
    document = parse_object(text, f"'{path}'")
    version = document.get("fp8kv_pack")
    if type(version) is int and version > _VERSION:
        problem = f"'{path}' is of a newer version of packs than this fp8kv reads, {_VERSION}"
        raise InputError(f"{problem}; install a newer fp8kv")
    if text != _manifest_text(document):
        raise _damaged(path, "it is not as fp8kv pack wrote it")
    try:
        return Pack.model_validate(document)
    except ValidationError as error:
        raise _damaged(path, first_problem(error)) from None


def write_manifest(directory: Path, facts: dict[str, Any]) -> Pack:
    """Write a manifest of the files in `directory`, with `facts` about the model."""
    paths = [path for name in FILES if (path := directory / name).exists()]
    files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path.read_bytes())} for path in paths}
    path = directory / PACK_FILE
    path.write_bytes(_manifest_text({"fp8kv_pack": _VERSION, **facts, "files": files}))
    return _read_manifest(path)


def _manifest_text(document: dict[str, Any]) -> bytes:
    """Return `document` as the text of a manifest, which ends with the checksum of all before."""
    body = {key: value for key, value in document.items() if key != "sha256"}
    checksum = _sha256(f"{json_text(body, indent=2)}\n".encode())
    return f"{json_text(body | {'sha256': checksum}, indent=2)}\n".encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _damaged(path: Path, problem: str) -> InputError:
    return InputError(f"'{path}' is damaged or changed ({problem}); get the pack again")
