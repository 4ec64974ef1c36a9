"""Directories of two layers with scales, for the tests of `fp8kv verify`."""

import json

import torch
from safetensors.torch import save_file

GOOD = {"0": {"0": 0.5, "1": 0.25}}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
}
NVFP4 = {  # of the cache alone, as ModelOpt writes it
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["*"],
    "kv_cache_scheme": "NVFP4",
    "kv_cache_quant_algo": "NVFP4",
}
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG |= {"num_key_value_heads": 2, "architectures": ["LlamaForCausalLM"]}
NAMES = "{module}.{x}_scale"


def model(
    directory,
    k=(0.5, 0.25),
    v=(0.125, 0.0625),
    *,
    config=COMPRESSED,
    json_file=None,
    names=NAMES,
    **document,
):
    """Two layers; without `config` the model says nothing of a quantised cache.

    `document` goes into config.json; None takes a key away.
    """
    directory.mkdir(exist_ok=True)
    tensors = {}
    for i in range(2):
        name = f"model.layers.{i}.self_attn"
        tensors[f"{name}.k_proj.weight"] = torch.ones(2)
        if k and v:
            for x, scales in {"k": k, "v": v}.items():
                tensors[names.format(module=name, x=x)] = torch.tensor([scales[i]])
    save_file(tensors, directory / "model.safetensors")
    document = CONFIG | ({"quantization_config": config} if config else {}) | document
    document = {key: value for key, value in document.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(document))
    if json_file is not None:
        (directory / "kv_cache_scales.json").write_text(json.dumps(json_file))
    return directory


def lines_of(done):
    return " ".join(done.stdout.split())
