"""Our plugin in SGLang's own registry of hooks, on models of its classes; no server, no GPU.

check_sglang_plugin.py   exit 0 if it says the right line for a class that loads scales, and for one
                         that has no place for them
"""

import json
import logging
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import no_pictures  # noqa: F401 (before SGLang)
import torch
from check_sglang import scales_of
from scale_cases import CASES, write_case
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_classes import CPU, attention, held_by, loader, made_of

from calib.serving.plugin import ScalesNotUsedError, register_sglang

EXPECTED = {
    "LlamaForCausalLM": ("llama", "fp8kv: 4 of 4 KV scales in use, FP8 cache"),
    "Qwen3ForCausalLM": (
        "qwen3",
        "fp8kv: 0 of 4 KV scales in use, FP8 cache; "
        "K is at 1.0: the engine dropped the file's scale in layers 0, 1; "
        "V is at 1.0: the engine dropped the file's scale in layers 0, 1",
    ),
}


def runner(directory: Path) -> SimpleNamespace:
    """A worker's runner with its model loaded, as far as the plugin looks at it."""
    model = made_of(SimpleNamespace(name=str(directory)))
    loader.DefaultModelLoader.load_weights_only(model, iter(scales_of(directory)), CPU)
    for layer in attention(model).values():
        held_by(layer)  # makes it ready to serve
    config = SimpleNamespace(model_path=str(directory), revision=None)
    return SimpleNamespace(
        model=model, model_config=config, is_draft_worker=False, kv_cache_dtype=torch.float8_e4m3fn
    )


def of_class(architecture: str, path: Path, model_type: str) -> Path:
    """The directory, as if its model were of that class."""
    config = json.loads((path / "config.json").read_text())
    named = {"architectures": [architecture], "model_type": model_type}
    (path / "config.json").write_text(json.dumps(config | named))
    return path


def main() -> None:
    """Load both, and call what the plugin hooks."""
    os.environ["FP8KV_REQUIRE_SCALES"] = "1"
    lines: list[str] = []
    logger = logging.getLogger("sglang.fp8kv")
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    ModelRunner.configure_kv_cache_dtype = lambda self: None  # needs a whole server
    register_sglang()
    HookRegistry.apply_hooks()
    (case,) = [case for case in CASES if case.name == "one scale per layer, [1]"]
    wrong = 0
    for architecture, (model_type, expected) in EXPECTED.items():
        with TemporaryDirectory() as scratch:
            path = of_class(architecture, write_case(case, Path(scratch, "model")), model_type)
            try:
                ModelRunner.configure_kv_cache_dtype(runner(path))
            except ScalesNotUsedError as error:
                lines.append(str(error))
        is_right = lines[-1:] == [expected]
        wrong += not is_right
        print(f"{'OK' if is_right else 'WRONG'} {architecture}: {lines[-1:]}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    with torch.no_grad():
        main()
