"""Models in each form of quantised weights: the configs that say so, and what makes the tensors."""

import json
import re
import shutil
from dataclasses import dataclass, field
from typing import Any

from coded_weights import awq, fp8, gpt_oss, gptq, int8, mxfp4, mxfp8, nvfp4, packed
from quantized_models import edit_json
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Form:
    """One weight format: its quantization_config, and what makes tensors and values of a weight."""

    says: dict[str, Any]
    make: Any
    options: dict[str, Any] = field(default_factory=dict)
    file: str = "config.json"  # where the config is
    weights: str = r"(?:_proj|experts\.\d+\.w\d)\.weight$"  # a pattern of their names

    def quantised(self, model, directory):
        """A copy of the model in this form."""
        shutil.copytree(model, directory)
        return self.quantise(directory)

    def quantise(self, directory, plain=None):
        """Quantise the model in `directory`, and keep what its weights stand for in `plain`."""
        if plain:
            shutil.copytree(directory, plain)
        coded, values = {}, {}
        for name, tensor in load_file(directory / "model.safetensors").items():
            values[name] = tensor
            if not re.search(self.weights, name):
                coded[name] = tensor
                continue
            module = name.removesuffix(".weight")
            tensors, values[name] = self.make(module, tensor.float(), **self.options)
            coded |= tensors
        save_file(coded, directory / "model.safetensors", {"format": "pt"})
        if plain:
            kept = {name: value.contiguous() for name, value in values.items()}
            save_file(kept, plain / "model.safetensors", {"format": "pt"})
        if self.file == "config.json":
            edit_json(directory / "config.json", quantization_config=self.says)
        else:
            (directory / self.file).write_text(json.dumps(self.says))
        return directory


def compressed(form, bits, kind="int", **weights):
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def gptq_says(bits=4, **more):
    says = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, "sym": False}
    return {**says, **more}


def quark_says(**weight):
    return {
        "quant_method": "quark",
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
        "global_quant_config": {"weight": {"is_dynamic": False, **weight}},
        "layer_quant_config": {},
        "exclude": ["lm_head"],
    }


GPT_OSS = Form({"quant_method": "mxfp4"}, gpt_oss, weights=r"experts\.\w+_proj$")
GROUP = {"strategy": "group", "group_size": 32}
FORMS = {
    "gptq-2": Form(gptq_says(2), gptq, {"bits": 2}),
    "gptq-3": Form(gptq_says(3), gptq, {"bits": 3}),
    "gptq-4": Form(gptq_says(), gptq),
    "gptq-4-ordered": Form(gptq_says(desc_act=True), gptq, {"ordered": True}),
    "gptq-8": Form(gptq_says(8), gptq, {"bits": 8}),
    "gptq-v2": Form(gptq_says(checkpoint_format="gptq_v2"), gptq, {"version": 2}),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "compressed-fp8": Form(
        compressed("float-quantized", 8, "float", strategy="tensor"),
        fp8,
        {"shape": [1], "extra": ["input_scale"]},
    ),
    "compressed-fp8-channel": Form(
        compressed("float-quantized", 8, "float", strategy="channel"), fp8, {"high": 1}
    ),
    "compressed-fp8-block": Form(
        compressed("float-quantized", 8, "float", strategy="block", block_structure=[40, 48]),
        fp8,
        {"high": 40, "wide": 48},
    ),
    "compressed-int8": Form(compressed("int-quantized", 8, strategy="channel"), int8),
    "compressed-int8-asymmetric": Form(
        compressed("int-quantized", 8, strategy="channel", symmetric=False),
        int8,
        {"symmetric": False},
    ),
    "compressed-w4": Form(compressed("pack-quantized", 4, **GROUP), packed),
    "compressed-w4-asymmetric": Form(
        compressed("pack-quantized", 4, symmetric=False, **GROUP), packed, {"symmetric": False}
    ),
    "compressed-w4-ordered": Form(
        compressed("pack-quantized", 4, actorder="group", **GROUP), packed, {"ordered": True}
    ),
    "compressed-w3": Form(compressed("pack-quantized", 3, **GROUP), packed, {"bits": 3}),
    "compressed-w3-of-0.17": Form(
        compressed("pack-quantized", 3, **GROUP), packed, {"bits": 3, "per_word": 10}
    ),
    "compressed-w8-channel": Form(
        compressed("pack-quantized", 8, strategy="channel"), packed, {"bits": 8, "group": None}
    ),
    "compressed-nvfp4": Form(
        compressed("nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group_size=16),
        nvfp4,
    ),
    "compressed-mxfp4": Form(compressed("mxfp4-pack-quantized", 4, "float", **GROUP), mxfp4),
    "compressed-mxfp8": Form(compressed("mxfp8-quantized", 8, "float", **GROUP), mxfp8),
    "modelopt-fp8": Form(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        fp8,
        {"shape": [], "extra": ["input_scale"]},
    ),
    "modelopt-nvfp4": Form(
        {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}},
        nvfp4,
        {"form": "modelopt"},
        "hf_quant_config.json",
    ),
    "fp8-block": Form(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [40, 48]},
        fp8,
        {"high": 40, "wide": 48, "name": "weight_scale_inv"},
    ),
    "fp8-tensor": Form(
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8,
        {"shape": [], "extra": ["input_scale"]},
    ),
    "quark-fp8": Form(
        quark_says(dtype="fp8_e4m3", qscheme="per_tensor"),
        fp8,
        {"shape": [], "extra": ["input_scale"]},
    ),
    "quark-mxfp4": Form(
        quark_says(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"),
        mxfp4,
        {"name": "weight"},
    ),
}
