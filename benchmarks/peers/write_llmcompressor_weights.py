"""What llm-compressor writes of quantised weights, and what compressed-tensors makes of them.

Runs in an environment that holds llm-compressor, not ours: `make bench-golden`.
"""

import json
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import quantized
import tiny_llama
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4 import base as nvfp4
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from torch import Tensor

IGNORE = ["lm_head"]
ORDERED = "0.12.0"
Modifier = Any


def main() -> None:
    """Write and keep each, or those that are named."""
    # it pins memory, for a GPU that is not there
    IntermediatesCache.pin_memory = lambda *_: None
    # decoding FP4 in float32, not bfloat16
    nvfp4.unpack_fp4_from_uint8 = partial(nvfp4.unpack_fp4_from_uint8, dtype=torch.float32)
    old = version("llmcompressor") == ORDERED
    for case, recipe in (_ordered() if old else _recipes()).items():
        if case in (sys.argv[1:] or [case]):
            _write(case, recipe)


def _ordered() -> dict[str, list[Modifier]]:
    """With `weight_g_idx`, which later versions refuse to write and to read."""
    groups = scheme("W4A16", strategy="group", group_size=32)
    return {"w4a16-gptq-group": [gptq(groups, "group")]}


def _recipes() -> dict[str, list[Modifier]]:
    names = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4", "MXFP8")
    presets = {name.lower().replace("_", "-"): [plain(scheme(name))] for name in names}
    group = {"strategy": "group", "group_size": 32}
    smooth = SmoothQuantModifier(smoothing_strength=0.8)
    return {
        **presets,
        "w8a8-smoothquant": [smooth, gptq(scheme("W8A8"), "static")],
        "w8a16": [plain(scheme("W8A16", strategy="channel", group_size=None))],
        "w8a16-group": [plain(scheme("W8A16", **group))],
        "w3a16": [plain(scheme("W3A16", **group))],
        "w4a16": [plain(scheme("W4A16", **group))],
        "w4a16-asym": [plain(scheme("W4A16_ASYM", **group))],
        "w4a16-gptq": [gptq(scheme("W4A16", **group), None)],
        "w4a16-gptq-static": [gptq(scheme("W4A16", **group), "static")],
        "w4a16-awq": [AWQModifier(), plain(scheme("W4A16_ASYM", **group))],
    }


def scheme(name: str, **weights: Any) -> QuantizationScheme:
    """Change the weights' settings in a preset of all linear layers."""
    preset = preset_name_to_scheme(name, ["Linear"])
    changed = {**preset.weights.model_dump(), **weights}
    return QuantizationScheme(**{**preset.model_dump(), "weights": changed})


def plain(scheme: QuantizationScheme) -> Modifier:
    """Round to nearest."""
    return QuantizationModifier(config_groups={"group_0": scheme}, ignore=IGNORE)


def gptq(scheme: QuantizationScheme, order: str | None) -> Modifier:
    """Round so that outputs change least; `order` is `actorder`."""
    return GPTQModifier(config_groups={"group_0": scheme}, ignore=IGNORE, actorder=order)


def _write(case: str, recipe: list[Modifier]) -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        shape = quantized.BLOCK_SHAPE if "block" in case else quantized.SHAPE
        model = tiny_llama.make(scratch / "model", **shape)
        ids = tiny_llama.token_ids().tolist()
        masks = [[1] * len(row) for row in ids]
        oneshot(
            model=model,
            processor=tiny_llama.tokenizer(),
            dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": masks}),
            recipe=recipe,
            max_seq_length=tiny_llama.LENGTH,
            num_calibration_samples=tiny_llama.SAMPLES,
            shuffle_calibration_samples=False,
        )
        output = scratch / "output"
        model.save_pretrained(output, save_compressed=True)
        weights = {
            module: dequantized(parts, output) for module, parts in quantized.attention_parts(output).items()
        }
        how = f"compressed_tensors {version('compressed_tensors')}, decompress, scales in float32"
        quantized.keep(output, "llmcompressor", case, weights, how)


def dequantized(parts: dict[str, Tensor], output: Path) -> Tensor:
    """Decode the weight [rows, columns] that stored `parts` stand for, in float32."""
    says = json.loads((output / "config.json").read_text())["quantization_config"]
    (group,) = says["config_groups"].values()
    scheme = QuantizationScheme(**group)
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    wide = {
        name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in parts.items()
    }
    return compressor.decompress(wide, scheme)["weight"]


if __name__ == "__main__":
    main()
