"""Packs on the Hub: pushed whole, and fetched file by file as the manifest says."""

import re
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download
from huggingface_hub import errors as hub

from calib.errors import InputError
from calib.files.names import PACK_FILE
from calib.files.pack import FILES, MAX_MANIFEST_BYTES, read_manifest
from calib.models.sources import ask_hub
from calib.progress import SILENT, Progress
from calib.transfer.packing import HUB_ID

_REVISION = re.compile(r"[\w./-]{1,200}", re.ASCII)
_OF_THE_HUB = {".gitattributes"}  # in every new repository


def find_calibration(given: str, progress: Progress = SILENT) -> tuple[Path, str]:
    """Where the calibration or pack `given` is, and its name: a path, or `owner/name[@revision]`.

    What is no path is fetched from the Hub into its cache; InputError where it is no pack there.
    The files are checked where they are read.
    """
    path = Path(given).expanduser()
    name, at, revision = given.partition("@")
    if path.exists() or not HUB_ID.fullmatch(name) or (at and not _REVISION.fullmatch(revision)):
        return path, str(path)  # which may not be there, as its reader says
    progress.stage("fetch")
    directory = ask_hub("pack", name, lambda: _fetch(name, revision or None))
    return directory, f"{name}@{directory.name}"


def push(directory: Path, name: str, *, private: bool = False) -> str:
    """Put the pack in `directory` into the repository `name`, in one commit; return its address.

    The repository is made where there is none. InputError if it holds something else, or is public
    and should be `private`, or the Hub refuses.
    """
    check_name(name)
    try:
        return _commit(HfApi(), directory, name, private=private)
    except (hub.HTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
    raise InputError(f"the pack is in '{directory}', and was not pushed to '{name}': {reason}")


def check_name(name: str) -> None:
    """Refuse what is no name of a repository."""
    if not HUB_ID.fullmatch(name):
        raise InputError(f"--push-to-hub '{name}' is no id on the Hub, such as owner/name")


def _commit(api: HfApi, directory: Path, name: str, *, private: bool) -> str:
    try:
        there = api.model_info(name)
    except hub.RepositoryNotFoundError:
        api.create_repo(name, private=private or None)
        there = api.model_info(name)
    held = {sibling.rfilename for sibling in there.siblings or ()}
    if private and not there.private:
        raise InputError("it is public there; make it private, or choose another name")
    if PACK_FILE not in held and held - _OF_THE_HUB:
        raise InputError("it holds other files and no pack; choose another name")
    mine = sorted(file.name for file in directory.iterdir())
    operations = [CommitOperationAdd(file, str(directory / file)) for file in mine]
    operations += [CommitOperationDelete(file) for file in sorted(held & {*FILES} - {*mine})]
    message = "KV-cache scales, packed by fp8kv"
    done = api.create_commit(name, operations, commit_message=message, parent_commit=there.sha)
    return f"{done.repo_url} at {done.oid}"


def _fetch(name: str, revision: str | None) -> Path:
    manifest = _download(name, PACK_FILE, revision, MAX_MANIFEST_BYTES)
    directory = manifest.parent
    for file, known in read_manifest(manifest).files.items():
        _download(name, file, directory.name, known.size)
    return directory


def _download(name: str, file: str, revision: str | None, limit: int) -> Path:
    """Fetch one file of at most `limit` bytes."""
    try:
        about = hf_hub_download(name, file, revision=revision, dry_run=True)
        if about.file_size is None or about.file_size > limit:
            raise InputError(f"'{name}' on the Hub: {file} has more than {limit:,} bytes")
        # by its own name, for the cache to know it without a network
        return Path(hf_hub_download(name, file, revision=revision))
    except hub.RevisionNotFoundError:
        raise InputError(f"'{name}' on the Hub has no revision '{revision}'") from None
    except hub.RemoteEntryNotFoundError:
        raise InputError(f"'{name}' on the Hub is no whole pack: it has no {file}") from None
