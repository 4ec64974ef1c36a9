"""Our plugin in SGLang's own registry of hooks, on models of its classes; no server, no GPU.

check_sglang_plugin.py   exit 0 if it says the right line for a class that loads scales, one that
                         drops them, one with latent attention, and one that transformers computes
"""

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import no_pictures  # noqa: F401 (before SGLang)
import torch
from engine_cases import QUANTIZATIONS, fixtures, scale_tensors, write
from safetensors.torch import save_file
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_classes import load

sys.path.insert(0, str(Path(__file__).parents[2]))

from calib.serving.plugin import ScalesNotUsedError, register_sglang

PROJECTIONS = "{module}.{x}_proj.{x}_scale"
ALL = "fp8kv: 4 of 4 KV scales in use, FP8 cache"
AT_1 = "is at 1.0: the engine dropped the file's scale in layers 0, 1"
EXPECTED = {
    "LlamaForCausalLM": ALL,
    "Qwen3ForCausalLM": f"fp8kv: 0 of 4 KV scales in use, FP8 cache; K {AT_1}; V {AT_1}",
    "DeepseekV3ForCausalLM": ALL,
    "CwmForCausalLM": f"fp8kv: 0 of 8 KV scales in use, FP8 cache; K {AT_1}, 2, 3; V {AT_1}, 2, 3",
}
# transformers computes it: with a scale it does not load
REFUSES = ("CwmForCausalLM",)


def runner(directory: Path, scales: Iterable[tuple[str, torch.Tensor]]) -> SimpleNamespace:
    """A worker's runner with its model loaded, as far as the plugin looks at it."""
    model = load(directory, scales)
    config = SimpleNamespace(model_path=str(directory), revision=None)
    loading = SimpleNamespace(load_format="auto", download_dir=None)
    return SimpleNamespace(
        model=model, model_config=config, load_config=loading, kv_cache_dtype=torch.float8_e4m3fn
    )


def main() -> None:
    """Load each, and call what the plugin hooks."""
    os.environ["FP8KV_REQUIRE_SCALES"] = "1"
    lines: list[str] = []
    logger = logging.getLogger("sglang.fp8kv")
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    ModelRunner.configure_kv_cache_dtype = lambda self: None  # needs a whole server
    register_sglang()
    HookRegistry.apply_hooks()
    wrong = 0
    for fixture in fixtures([*EXPECTED]):
        with TemporaryDirectory() as scratch:
            directory = write(fixture, QUANTIZATIONS["compressed-tensors"], Path(scratch))
            scales = scale_tensors(fixture, PROJECTIONS)
            save_file(dict(scales), directory / "model.safetensors")
            loaded = [] if fixture.architecture in REFUSES else scales
            try:
                ModelRunner.configure_kv_cache_dtype(runner(directory, loaded))
            except ScalesNotUsedError as error:
                lines.append(str(error))
        architecture = fixture.architecture
        expected = EXPECTED[architecture]
        is_right = lines[-1:] == [expected]
        wrong += not is_right
        print(f"{'OK' if is_right else 'WRONG'} {architecture}: {lines[-1:]}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    with torch.no_grad():
        main()
