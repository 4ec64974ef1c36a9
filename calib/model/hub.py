"""Model downloads from the Hugging Face Hub, and what each of its refusals means to a user."""

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from calib.errors import InputError

# pickled weights are never downloaded
_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.md", "tokenizer*"]


def download_model(repo: str) -> Path:
    """Download (or find in the Hub cache) a model and return its directory.

    Raises:
        InputError: no such model, a gated model, or no way to the Hub.
    """
    return _download(repo, lambda: snapshot_download(repo, allow_patterns=_FILES))


def download_config(repo: str) -> Path:
    """Download (or find in the Hub cache) a model's config.json alone and return its path.

    Raises:
        InputError: no such model, a gated model, or no way to the Hub.
    """
    return _download(repo, lambda: hf_hub_download(repo, "config.json"))


def _download(repo: str, download: Callable[[], str]) -> Path:
    try:
        return Path(download())
    except GatedRepoError:
        message = (
            f"is gated: accept its terms at https://huggingface.co/{repo}, then `hf auth login`"
        )
    except (RepositoryNotFoundError, HFValidationError):
        message = (
            "is neither a directory nor a model on the Hub (or it is private: `hf auth login`)"
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        message = (
            f"is not a local directory, and the Hub cannot be reached ({reason}); "
            "download it elsewhere and give its directory, or try builtin:smollm2"
        )
    raise InputError(f"model '{repo}' {message}")
