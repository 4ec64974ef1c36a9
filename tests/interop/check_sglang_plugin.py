"""Our plugin in SGLang's own registry of hooks, on models of its classes; no server, no GPU.

check_sglang_plugin.py   exit 0 if it says the right line for a class that loads scales, one that
                         drops them, one with latent attention, and one that transformers computes;
                         and for scales that came with --quantization-param-path
"""

import json
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
EMPTY = "is empty, which kernels take for 1.0 in layers 0, 1"
FROM_JSON = (
    "fp8kv: 0 of 4 KV scales in use, FP8 cache; "
    f"K's copy k_scale_float {EMPTY}; V's copy v_scale_float {EMPTY}"
)


def runner(directory: Path, scales: Iterable[tuple[str, torch.Tensor]]) -> SimpleNamespace:
    """A worker's runner with its model loaded, as far as the plugin looks at it."""
    model = load(directory, scales)
    config = SimpleNamespace(model_path=str(directory), revision=None)
    loading = SimpleNamespace(load_format="auto", download_dir=None)
    return SimpleNamespace(
        model=model, model_config=config, load_config=loading, kv_cache_dtype=torch.float8_e4m3fn
    )


def with_json(directory: Path) -> SimpleNamespace:
    """A runner whose model SGLang has given the scales of a kv_cache_scales.json."""
    (fixture,) = fixtures(["LlamaForCausalLM"])
    write(fixture, QUANTIZATIONS["none"], directory)
    factors = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 0.25}}}
    file = directory / "kv_cache_scales.json"
    file.write_text(json.dumps({"model_type": "llama", "kv_cache": factors}))
    found = runner(directory, [])
    found.model.load_kv_cache_scales(str(file))
    return found


def is_right(name: str, lines: list[str], loaded: SimpleNamespace, expected: str) -> bool:
    """Call what the plugin hooks; whether it says what it must, and ends the server unless good."""
    ends = False
    try:
        ModelRunner.configure_kv_cache_dtype(loaded)
    except ScalesNotUsedError as error:
        lines.append(str(error))
        ends = True
    right = lines[-1:] == [expected] and ends == (expected != ALL)
    print(f"{'OK' if right else 'WRONG'} {name}: {lines[-1:]}")
    return right


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
    with TemporaryDirectory() as scratch:
        loaded = with_json(Path(scratch))
        wrong = int(not is_right("--quantization-param-path", lines, loaded, FROM_JSON))
    for fixture in fixtures([*EXPECTED]):
        with TemporaryDirectory() as scratch:
            directory = write(fixture, QUANTIZATIONS["compressed-tensors"], Path(scratch))
            scales = scale_tensors(fixture, PROJECTIONS)
            save_file(dict(scales), directory / "model.safetensors")
            loaded = [] if fixture.architecture in REFUSES else scales
            each = runner(directory, loaded)
            architecture = fixture.architecture
            wrong += not is_right(architecture, lines, each, EXPECTED[architecture])
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    with torch.no_grad():
        main()
