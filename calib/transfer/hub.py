"""Packs on the Hub: uploaded whole, and downloaded by the names that a pack may hold."""

import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub import errors as hub
from huggingface_hub.utils import tqdm

from calib.arguments import to_path
from calib.errors import InputError, one_line
from calib.files.names import CALIBRATION_FILE, PACK_FILE, STATS_FILE
from calib.files.pack import FILES, LARGEST_FILES
from calib.models.sources import ask_hub
from calib.progress import Progress

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)
_REVISION = re.compile(r"[\w./-]{1,200}", re.ASCII)
_NEW_REPOSITORY = {".gitattributes"}  # the files of one


class _HiddenBar(tqdm):  # type: ignore[misc]
    """A progress bar of the Hub library that is not drawn, also where it is not on a terminal."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{**options, "disable": True})


def find_calibration(name: str, progress: Progress) -> tuple[Path, str]:
    """Find the calibration or pack `name`: a path, or `owner/name[@revision]` on the Hub.

    Return its directory, which need not exist, and its name with the commit. A pack is downloaded into the
    Hub's cache. Its files are checked where they are read.
    """
    path = to_path(name)
    repository, at, revision = name.partition("@")
    if path.exists() or not _ID.fullmatch(repository) or (at and not _REVISION.fullmatch(revision)):
        return path, str(path)
    progress.stage("fetch")
    directory = ask_hub("pack", repository, lambda: _download(repository, revision or "main"))
    return directory, f"{repository}@{directory.name}"


def _download(name: str, revision: str) -> Path:
    """Download the files of a pack, once it is known that none is larger than it may be."""
    options = {"allow_patterns": [*LARGEST_FILES], "tqdm_class": _HiddenBar}
    problem: BaseException | None = None
    try:
        for file in snapshot_download(name, revision=revision, dry_run=True, **options):
            limit = LARGEST_FILES[file.filename]
            if file.file_size is None:
                raise InputError(
                    f"'{name}' on the Hub: the size of {file.filename} is not given, so it is not fetched; "
                    "download the pack and give its directory"
                )
            if file.file_size > limit:
                raise InputError(f"'{name}' on the Hub: {file.filename} has more than {limit:,} bytes")
            revision = file.commit_hash  # a branch may move to files of another size
    except hub.RevisionNotFoundError:
        raise InputError(f"'{name}' on the Hub has no revision '{revision}'") from None
    except hub.DryRunError as error:  # the Hub does not answer; the pack may be in the cache
        options["local_files_only"], problem = True, error.__cause__
    try:
        directory = Path(snapshot_download(name, revision=revision, **options))
    except hub.LocalEntryNotFoundError as error:
        raise problem or error from None
    for required in (PACK_FILE, CALIBRATION_FILE, STATS_FILE):
        if not (directory / required).exists():
            raise InputError(f"'{name}' on the Hub is not a whole pack: it has no {required}")
    return directory


def push(directory: Path, name: str, *, private: bool = False) -> str:
    """Upload the pack in `directory` to the repository `name`; return its address and commit.

    The repository is made where there is none. InputError if it holds something else, or is public and
    should be `private`, or the Hub refuses.
    """
    api = HfApi()
    try:
        if not api.repo_exists(name):
            api.create_repo(name, private=private or None)
        repository = api.model_info(name)
        names = {sibling.rfilename for sibling in repository.siblings or ()}
        if private and not repository.private:
            raise InputError("it is public there; make it private, or choose another name")
        if PACK_FILE not in names and names - _NEW_REPOSITORY:
            raise InputError("it holds other files and no pack; choose another name")
        commit = api.upload_folder(
            repo_id=name,
            folder_path=directory,
            delete_patterns=[*FILES],  # those of an earlier pack that this one lacks
            commit_message="KV-cache scales, packed by fp8kv",
            parent_commit=repository.sha,
        )
    except (hub.HTTPError, OSError, ValueError) as error:
        problem = f"the pack is in '{directory}', and was not pushed to '{name}'"
        raise InputError(f"{problem}: {one_line(error)}") from None
    return f"{commit.repo_url} at {commit.oid}"


def check_hub_id(flag: str, name: str) -> None:
    """Refuse the value of `flag` unless it can be the name of a repository."""
    if not _ID.fullmatch(name):
        raise InputError(f"{flag} '{name}' is not an id on the Hub, such as owner/name")
