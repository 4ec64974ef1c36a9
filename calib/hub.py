"""Model downloads from the Hugging Face Hub, and what each of its refusals means to a user."""

from pathlib import Path

from huggingface_hub import snapshot_download
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
    try:
        return Path(snapshot_download(repo, allow_patterns=_FILES))
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
