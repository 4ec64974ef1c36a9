"""Whether a directory's weights were baked, so that scale 1.0 is right for them."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from calib.choices import FP8Name
from calib.files.file_names import BAKE_FILE, SINGLE_FILE
from calib.files.folder import read_index
from calib.files.headers import Entry, read_header
from calib.files.names import is_of_cache
from calib.files.strict_json import read_object

_SAMPLED_BLOCKS = 16
_BLOCK_BYTES = 4096
_SAMPLE_BYTES = 256
_ATTENTION = re.compile("attn|attention")
_NO_EXPERT = re.compile(r"^(?!.*\bexperts\.)")  # of which there can be tens of thousands


class Digest(Protocol):
    """What hashlib makes."""

    def update(self, data: bytes, /) -> object:
        """Add `data`."""
        ...


def baked_for(path: Path) -> str | None:
    """What the weights of a directory were baked for, fp8 or int8; None: they are no baked ones."""
    file = path / BAKE_FILE
    says = read_object(file) if file.exists() else {}
    purpose = says.get("for")
    is_own = purpose is not None and says.get("weights") == weights_digest(path)
    return str(purpose) if is_own else None


def baked_fp8_type(path: Path) -> FP8Name:
    """The FP8 type whose range K and V of a baked model fill."""
    says = read_object(path / BAKE_FILE)
    return "e4m3fnuz" if says.get("fp8_dtype") == "e4m3fnuz" else "e4m3fn"


def baked_from(path: Path) -> str:
    """The fingerprint of the model that a baked one was made from."""
    return str(read_object(path / BAKE_FILE).get("source"))


def bakes_latents(path: Path) -> bool:
    """Whether latents (MLA) of a baked model were, in K's place."""
    return read_object(path / BAKE_FILE).get("latent") is True


def weights_digest(path: Path, *, beyond_attention: bool = False) -> str:
    """The sha256 of a few bytes of every tensor of attention; scales of the KV cache left out.

    Or of all tensors but those of experts. It does not change where files are renamed, or scales
    put beside the weights.
    """
    wanted = _NO_EXPERT if beyond_attention else _ATTENTION
    shards = sorted({*(read_index(path) or {}).values()} or {SINGLE_FILE})
    found: dict[str, tuple[Path, Entry]] = {}
    for file in (path / shard for shard in shards):
        header = read_header(file) if file.exists() else {}
        found |= {name: (file, entry) for name, entry in header.items() if wanted.search(name)}
    digest = hashlib.sha256()
    for name in sorted(name for name in found if not is_of_cache(name)):
        file, entry = found[name]
        digest.update(f"{name} {entry.dtype} {entry.shape} ".encode())
        with file.open("rb") as opened:
            for place in (entry.begin, (entry.begin + entry.end) // 2):
                opened.seek(place)
                digest.update(opened.read(min(_SAMPLE_BYTES, entry.end - place)))
    return digest.hexdigest()


def add_files(digest: Digest, path: Path, shards: Iterable[str]) -> None:
    """Add each weight file's name, size, header and a few blocks to `digest`."""
    for shard in shards:
        size = (path / shard).stat().st_size
        digest.update(f"{shard} {size} ".encode())
        with (path / shard).open("rb") as file:
            digest.update(file.read(8 + int.from_bytes(file.read(8), "little")))
            for i in range(_SAMPLED_BLOCKS):
                file.seek(i * size // _SAMPLED_BLOCKS)
                digest.update(file.read(_BLOCK_BYTES))
