"""Our plugin in SGLang's own registry of hooks, on models of its classes; no server, no GPU.

check_sglang_plugin.py   exit 0 if it says the right line for a class that loads scales, one that
                         drops them, one with latent attention, and one that transformers computes;
                         for scales that came with --quantization-param-path, and for some that SGLang
                         processes twice on a GPU whose FP8 type ends at 240, as after an update of weights
"""

import json
import logging
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import no_pictures  # noqa: F401 (before SGLang)
import torch
from engine import tell
from engine_cases import QUANTIZATIONS, fixtures, scale_tensors, write
from safetensors.torch import save_file
from sglang.srt.layers.quantization import kv_cache
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_classes import load

from calib.serving.plugin import ScalesNotUsedError, register_sglang
from calib.serving.sglang_worker import sglang_attention

PROJECTIONS = "{module}.{x}_proj.{x}_scale"
ALL = "fp8kv: 4 of 4 KV scales in use, FP8 cache"
AT_1 = "is at 1.0: the engine dropped the file's scale in layers 0, 1"
EXPECTED = {
    "LlamaForCausalLM": ALL,
    "Qwen3ForCausalLM": f"fp8kv: 0 of 4 KV scales in use, FP8 cache; K {AT_1}; V {AT_1}",
    "DeepseekV3ForCausalLM": ALL,
    "CwmForCausalLM": f"fp8kv: 0 of 8 KV scales in use, FP8 cache; K {AT_1}, 2, 3; V {AT_1}, 2, 3",
}
EMPTY = "is empty, which kernels take for 1.0 in layers 0, 1"
FROM_JSON = f"{ALL.replace('4', '0', 1)}; K's copy k_scale_float {EMPTY}; V's copy v_scale_float {EMPTY}"
TWICE = f"{ALL.replace('4', '0', 1)}; K is doubled twice in layers 0, 1; V is doubled twice in layers 0, 1"
LINES: list[str] = []


def said(name: str, expected: str, model: torch.nn.Module, directory: Path) -> tuple[str, bool]:
    """Whether the plugin says what it must of a worker's runner, and ends the server unless good."""
    config = SimpleNamespace(model_path=str(directory), revision=None)
    loading = SimpleNamespace(load_format="auto", download_dir=None)
    runner = SimpleNamespace(model=model, model_config=config, load_config=loading)
    runner.kv_cache_dtype = torch.float8_e4m3fn
    ends = False
    try:
        ModelRunner.configure_kv_cache_dtype(runner)
    except ScalesNotUsedError as error:
        LINES.append(str(error))
        ends = True
    lines = [re.sub(", fingerprint [0-9a-f]{32}", "", line) for line in LINES[-1:]]
    return f"{name}: {lines}", lines == [expected] and ends == (expected != ALL)


def results():
    with TemporaryDirectory() as scratch:
        directory = write(*fixtures(["LlamaForCausalLM"]), QUANTIZATIONS["none"], Path(scratch))
        factors = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 0.25}}}
        file = directory / "kv_cache_scales.json"
        file.write_text(json.dumps({"model_type": "llama", "kv_cache": factors}))
        model = load(directory, [])
        model.load_kv_cache_scales(str(file))
        yield said("--quantization-param-path", FROM_JSON, model, directory)
    for fixture in fixtures([*EXPECTED]):
        name, scales = fixture.architecture, scale_tensors(fixture, PROJECTIONS)
        with TemporaryDirectory() as scratch:
            directory = write(fixture, QUANTIZATIONS["compressed-tensors"], Path(scratch))
            save_file(dict(scales), directory / "model.safetensors")
            # transformers computes Cwm: with a scale it does not load
            model = load(directory, [] if name == "CwmForCausalLM" else scales)
            yield said(name, EXPECTED[name], model, directory)
            if name == "LlamaForCausalLM":
                kv_cache.is_fp8_fnuz = lambda: True
                model = load(directory, scales)
                yield said("on MI300", ALL, model, directory)
                for layer in sglang_attention(model).values():
                    layer.quant_method.process_weights_after_loading(layer)
                yield said("on MI300, processed twice", TWICE, model, directory)
                kv_cache.is_fp8_fnuz = lambda: False


if __name__ == "__main__":
    os.environ["FP8KV_REQUIRE_SCALES"] = "1"
    logger = logging.getLogger("sglang.fp8kv")
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: LINES.append(record.getMessage()) or True)
    ModelRunner.configure_kv_cache_dtype = lambda self: None  # needs a whole server
    register_sglang()
    HookRegistry.apply_hooks()
    with torch.no_grad():
        tell(results())
