"""Directories of two layers with scales or statistics, and what an engine is said to do with them."""

import json

import torch
from safetensors.torch import save_file

from calib.engines.catalogue import find_engine
from calib.engines.outcome import Place
from calib.engines.simulate_loading import simulate
from calib.files.model_directory import open_model_directory
from calib.files.names import layer_of
from calib.scales.stats import KVStats, LayerStats, TensorStats
from calib.scales.stats_file import save_stats

COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}}
COMPRESSED |= {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}}
PER_HEAD = COMPRESSED | {"kv_cache_scheme": COMPRESSED["kv_cache_scheme"] | {"strategy": "attn_head"}}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
MODELOPT |= {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*"]}  # of the cache alone
NVFP4 |= {"kv_cache_scheme": "NVFP4", "kv_cache_quant_algo": "NVFP4"}
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG |= {"num_key_value_heads": 2, "architectures": ["LlamaForCausalLM"]}
NAMES, PROJ = "{module}.{x}_scale", "{module}.{x}_proj.{x}_scale"
MODULES = [f"model.layers.{i}.self_attn" for i in range(2)]
WEIGHTS = [f"{module}.k_proj.weight" for module in MODULES]


def scales_of(modules, names=NAMES):
    return [names.format(module=module, x=x) for module in modules for x in "kv"]


SCALES = scales_of(MODULES)


def model(
    directory, k=(0.5, 0.25), v=(0.125, 0.0625), *, config=COMPRESSED, json_file=None, names=NAMES, **document
):
    """Two layers, `config` of a quantised cache if any; `document` goes into config.json, but for None."""
    directory.mkdir(exist_ok=True)
    tensors = {name: torch.ones(2) for name in WEIGHTS}
    for i, module in enumerate(MODULES if k and v else ()):
        for x, scales in {"k": k, "v": v}.items():
            tensors[names.format(module=module, x=x)] = torch.tensor([scales[i]])
    save_file(tensors, directory / "model.safetensors")
    document = CONFIG | ({"quantization_config": config} if config else {}) | document
    document = {key: value for key, value in document.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(document))
    if json_file is not None:
        (directory / "kv_cache_scales.json").write_text(json.dumps(json_file))
    return directory


def write(directory, weights, scales, config=COMPRESSED, **document):
    tensors = {name: torch.ones(2) for name in weights}
    save_file(tensors | {name: torch.tensor([0.5]) for name in scales}, directory / "m.safetensors")
    layers = len({layer_of(name) for name in weights} - {None})
    document = CONFIG | {"quantization_config": config, "num_hidden_layers": layers} | document
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def save_amax(amax, directory, tokens=2048):
    """Write statistics of `amax`, by layer and letter: a number per head, or heads by channels."""
    directory.mkdir(exist_ok=True)
    layers = {}
    for i in sorted({layer for layer, _ in amax}):
        of = {x: torch.as_tensor(amax.get((i, x), [1.0]), dtype=torch.float32) for x in "kvq"}
        parts = (TensorStats(x if x.dim() == 2 else x[:, None]) for x in of.values())
        layers[f"model.layers.{i}.self_attn"] = LayerStats(i, tokens, *parts)
    save_stats(KVStats(layers), directory / "fp8kv_stats.safetensors")
    return directory


def simulated(directory, engine, version=None, **place):
    opened = open_model_directory(directory, weights=False)
    return simulate(opened, find_engine(engine, version), Place(**place))


def said(directory, engine):
    """`loaded`, `loaded with a flag`, `not known`, `refused`, or `1.0` for any layer at 1.0."""
    found = simulated(directory, engine)
    if found.is_good:
        return "loaded with a flag" if found.flag else "loaded"
    statuses = {outcome.status for outcome in found.outcomes if outcome.letter != "q"}
    return "refused" if found.refused else "not known" if "unknown" in statuses else "1.0"


def lines_of(done):
    return " ".join(done.stdout.split())
