"""Hand-made directories with scales, good and bad, and what vLLM makes of each.

`make test` compares `fp8kv verify` with the last column, `make interop` with vLLM itself.
"""

import json
from collections.abc import Callable
from itertools import product
from math import nan
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from calib.engines.outcome import Place

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 64
MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
MODEL |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
MODEL |= {"num_hidden_layers": LAYERS, "hidden_size": HEADS * HEAD_DIM, "intermediate_size": 256}
MODEL |= {"vocab_size": 128, "max_position_embeddings": 256, "tie_word_embeddings": True}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
PER_HEAD = SCHEME | {"strategy": "attn_head"}
Tensors = dict[str, torch.Tensor]


def compressed(scheme=SCHEME, **changes):
    """A config of compressed-tensors; a change to None leaves the key out."""
    config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    config |= {"ignore": [], "kv_cache_scheme": scheme} | changes
    return {key: value for key, value in config.items() if value is not None}


def with_scheme(**changes):
    return compressed(SCHEME | changes)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*"]}
MODELOPT |= {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
_LINEARS = [f"self_attn.{name}_proj" for name in ("qkv", "q", "k", "v", "o")]
_LINEARS += [f"mlp.{name}_proj" for name in ("gate_up", "gate", "up", "down")]
IGNORED = [f"model.layers.{i}.{name}" for i in range(LAYERS) for name in _LINEARS]
_FP8_OUTPUT = {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
_LAYERS = {"*k_proj": _FP8_OUTPUT, "*v_proj": _FP8_OUTPUT}
QUARKED = {"quant_method": "quark", "layer_quant_config": _LAYERS, "exclude": IGNORED}
QUARKED |= {"export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"}}
QUARKED |= {"layer_type_quant_config": {}, "global_quant_config": {}}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": IGNORED}


class Case(NamedTuple):
    """One directory. `expected`: what becomes of K, V and Q, or "refused"."""

    name: str
    config: dict | None
    tensors: Callable[[], Tensors]
    expected: str
    indexed: bool = True  # the scales' file is in the index
    index: bool = True  # there is an index
    also_indexed: tuple[str, ...] = ()  # files that the index names and that are not there
    key: str = "quantization_config"


def scales(
    k=0.02, v=0.01, q=None, *, names="{module}.{x}_scale", prefix="model.", dtype=torch.float32, layers=LAYERS
):
    """Scales of each layer, layer / 1000 added to numbers; None leaves a letter out."""

    def make() -> Tensors:
        made = {}
        for layer, (x, value) in product(range(layers), {"k": k, "v": v, "q": q}.items()):
            if value is not None:
                name = names.format(module=f"{prefix}layers.{layer}.self_attn", x=x)
                made[name] = (torch.tensor(value, dtype=torch.float64) + layer / 1000).to(dtype)
        return made

    return make


def heads(*values: float) -> list[list[list[float]]]:  # [H, 1, 1]
    return [[[value]] for value in values]


def with_zero_points() -> Tensors:
    made = ONE()
    return made | {n.replace("_scale", "_zero_point"): torch.zeros(1) for n in made}


def with_stray(name="kscale") -> Callable[[], Tensors]:
    """A misspelt name beside a scale for each layer."""
    return lambda: ONE() | {f"model.layers.1.self_attn.{name}": torch.tensor([0.02])}


CT, HEAD, OPT = compressed(), compressed(PER_HEAD), MODELOPT
NO_GROUPS = compressed(PER_HEAD, config_groups=None)
ONE = scales([0.02], [0.01])
K2, V2, Q4 = heads(0.02, 0.03), heads(0.01, 0.015), heads(0.04, 0.05, 0.06, 0.07)
_EIGHT = (0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.2)
PROJ = "{module}.{x}_proj.{x}_scale"
QUARK = "{module}.{x}_proj.output_scale"
# the values of an NVFP4 cache, as our formats write them, and as ModelOpt and AutoRound do
NVFP4 = OPT | {"kv_cache_scheme": "NVFP4", "kv_cache_quant_algo": "NVFP4"}
NO_KEY = OPT | {"kv_cache_scheme": "NVFP4"}
QUARKS = scales(names=QUARK)
_INT8_OUTPUT = {"output_tensors": {"dtype": "int8", "qscheme": "per_tensor"}}
_WORD = {"kv_cache_scheme": None, "kv_cache_quant_algo": "FP8"}


def grouped(group=("*k_proj", "*v_proj"), *, exclude=IGNORED, **layers):
    """Quark's config with another kv_cache_group, or other entries that it names."""
    export = {"pack_method": "reorder"} | ({} if group is None else {"kv_cache_group": [*group]})
    named = {f"*{name}": layers.get(name, _FP8_OUTPUT) for name in ("k_proj", "v_proj")}
    return QUARKED | {"export": export, "layer_quant_config": named, "exclude": exclude}


def mixed(algorithm="NVFP4", **changes):
    """ModelOpt's config of layers that differ, none of which this model has."""
    layers = {"model.layers.9.mlp.down_proj": {"quant_algo": algorithm, "group_size": 16}}
    config = MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers} | changes
    config = config if algorithm else config | {"quantized_layers": {}}
    return {key: value for key, value in config.items() if value is not None}


GLOBAL = "{module}.{x}_global_scale"

CASES = [
    Case("one scale per layer, [1]", CT, ONE, "k v"),
    Case("one scale per layer, []", CT, scales(), "k v"),
    Case("bfloat16", CT, scales([0.02], [0.01], dtype=torch.bfloat16), "k v"),
    Case("float16", CT, scales([0.02], [0.01], dtype=torch.float16), "k v"),
    Case("float64", CT, scales([0.02], [0.01], dtype=torch.float64), "k v"),
    Case("with query scales", CT, scales([0.02], [0.01], [0.03]), "k v q"),
    Case("with zero points", CT, with_zero_points, "k v"),
    Case("a misspelt name beside the scales", CT, with_stray(), "refused"),
    Case("a capital letter beside the scales", CT, with_stray("K_scale"), "refused"),
    Case("a plural beside the scales", CT, with_stray("key_scales"), "refused"),
    Case("per head, [H, 1, 1]", HEAD, scales(K2, V2), "k v"),
    Case("per head, [H]", HEAD, scales([0.02, 0.03], [0.01, 0.015]), "k v"),
    Case("per head, with query scales", HEAD, scales(K2, V2, Q4), "k v q"),
    Case("per head, query scales of KV heads", HEAD, scales(K2, V2, heads(0.04, 0.05)), "k v q"),
    Case("per head, one query scale", HEAD, scales(K2, V2, [0.04]), "refused"),
    Case("per head, one K scale", HEAD, scales([0.02], V2), "k v"),
    Case("per head, K scales of query heads", HEAD, scales(Q4, V2), "k v"),
    Case("per head, three K scales", HEAD, scales(heads(0.02, 0.03, 0.04), V2), "k v"),
    Case("per head, V scales of query heads", HEAD, scales(K2, Q4), "k v"),
    Case("per head, eight query scales", HEAD, scales(K2, V2, heads(*_EIGHT)), "k v q"),
    Case("per head, no config_groups", NO_GROUPS, scales(K2, V2), "refused"),
    Case("per head under strategy tensor", CT, scales(K2, V2), "refused"),
    Case("type int", with_scheme(type="int"), ONE, "refused"),
    Case("num_bits 4", with_scheme(num_bits=4), ONE, "refused"),
    Case("strategy channel", with_scheme(strategy="channel"), ONE, "refused"),
    Case("symmetric false", with_scheme(symmetric=False), ONE, "refused"),
    Case("no kv_cache_scheme", compressed(None), ONE, "k v"),
    Case("a layer without scales", CT, scales([0.02], [0.01], layers=1), "k v in 1 of 2"),
    Case("no V scales", CT, scales([0.02], None), "k"),
    Case("no K scales", CT, scales(None, [0.01]), "v"),
    Case("kv_scale", CT, scales([0.02], None, names="{module}.{x}v_scale"), "k"),
    Case("no prefix", CT, scales([0.02], [0.01], prefix=""), "refused"),
    Case("a layer too many", CT, scales([0.02], [0.01], layers=3), "refused"),
    Case("ModelOpt names", CT, scales([0.02], [0.01], names=PROJ), "k v"),
    Case("fused names", CT, scales([0.02], [0.01], names="{module}.qkv_proj.{x}_scale"), "k v"),
    Case("vLLM's own names", CT, scales([0.02], [0.01], names="{module}.attn.{x}_scale"), "k v"),
    Case("HY names", CT, scales([0.02], [0.01], names="{module}.{x}_cache.scale"), "k v"),
    Case("Quark names", CT, scales([0.02], [0.01], names=QUARK), "refused"),
    Case("zero", CT, scales([0.0], [0.01], layers=1), "k v in 1 of 2"),
    Case("negative", CT, scales([-0.02], [0.01]), "k v"),
    Case("NaN", CT, scales([nan], [0.01]), "k v"),
    Case("memory that nobody wrote", CT, scales([1e-33], [0.01], layers=1), "k v in 1 of 2"),
    Case("constant 1.0", CT, scales([1.0], [1.0]), "k v"),
    Case("not in the index", CT, ONE, "", indexed=False),
    Case("no index, two files", CT, ONE, "k v", index=False),
    Case("a shard that is not there", CT, ONE, "refused", also_indexed=("model-9.safetensors",)),
    Case("no quantization_config", None, ONE, "refused"),
    Case("no scales, no quantization_config", None, dict, ""),
    Case("no scales", CT, dict, ""),
    Case("compression_config", CT, ONE, "k v", key="compression_config"),
    Case("an unknown quant_method", {"quant_method": "nonsense"}, ONE, "refused"),
    Case("modelopt", OPT, scales(names=PROJ), "k v"),
    Case("modelopt, compressed-tensors names", OPT, ONE, "k v"),
    Case("modelopt with query scales", OPT, scales(0.02, 0.01, 0.03), "k v q"),
    Case("modelopt, kv_scale", OPT, scales(0.02, None, names="{module}.{x}v_scale"), "k v"),
    Case("modelopt, a misspelt name beside the scales", OPT, with_stray(), "refused"),
    Case("modelopt, K only", OPT, scales(0.02, None, names=PROJ), "k v"),
    Case("modelopt, V only", OPT, scales(None, 0.01, names=PROJ), "refused"),
    Case("modelopt, K zero", OPT, scales(0.0, 0.01, names=PROJ), "refused"),
    Case("modelopt, V zero", OPT, scales(0.02, 0.0, names=PROJ, layers=1), "k v in 1 of 2"),
    Case("modelopt, negative", OPT, scales(-0.02, -0.01, names=PROJ), ""),
    Case("modelopt, K NaN", OPT, scales(nan, 0.01, names=PROJ), "refused"),
    Case("modelopt, per head", OPT, scales(K2, V2, names=PROJ), "refused"),
    Case("modelopt, no quant_algo", OPT | {"quant_algo": None}, scales(names=PROJ), "refused"),
    Case("modelopt, no KV cache", OPT | {"kv_cache_scheme": None}, scales(names=PROJ), "k v"),
    Case("modelopt, tiles", OPT | {"quant_algo": "fp8_pb_wo"}, scales(names=PROJ), "k v"),
    Case("modelopt, nothing", OPT, dict, ""),
    Case("NVFP4", NVFP4, scales(names=PROJ), "k v"),
    Case("NVFP4, compressed-tensors names", NVFP4, ONE, "k v"),
    Case("NVFP4, no kv_cache_quant_algo", NO_KEY, scales(names=PROJ), "k v"),
    Case("NVFP4, no quant_algo", NVFP4 | {"quant_algo": None}, scales(names=PROJ), "refused"),
    Case("NVFP4, AutoRound", with_scheme(num_bits=4), scales(names=GLOBAL), "refused"),
    Case("fp8", FP8, scales(), "k v"),
    Case("fp8, a misspelt name beside the scales", FP8, with_stray(), "refused"),
    Case("fp8, Quark names", FP8, scales(names=QUARK), "k v"),
    Case("quark", QUARKED, scales(names=QUARK), "k v"),
    Case("quark, a misspelt name beside the scales", QUARKED, with_stray("kv-scale"), "refused"),
    Case("quark, other names", QUARKED, scales(), "k v"),
    Case("quark, no kv_cache_group", grouped(None), QUARKS, "refused"),
    Case("quark, an empty kv_cache_group", grouped([]), QUARKS, "k v"),
    Case("quark, kv_cache_group of nothing", grouped(["*x_proj"]), QUARKS, "refused"),
    Case("quark, kv_cache_group by pattern", grouped(["*_proj"]), QUARKS, "k v"),
    Case("quark, no output_tensors", grouped(v_proj={}), QUARKS, "refused"),
    Case("quark, K and V differ", grouped(v_proj=_INT8_OUTPUT), QUARKS, "refused"),
    Case("quark, INT8", grouped(k_proj=_INT8_OUTPUT, v_proj=_INT8_OUTPUT), QUARKS, "refused"),
    Case("quark, attention left out", grouped(exclude=[*IGNORED, "re:.*self_attn.*"]), QUARKS, ""),
    Case("mixed precision", mixed(), scales(names=PROJ), "k v"),
    Case("mixed precision, FP8 layers", mixed("FP8"), scales(names=PROJ), "k v"),
    Case("mixed precision, no layers", mixed(None), scales(names=PROJ), "refused"),
    Case("mixed precision, no cache", mixed(kv_cache_scheme=None), scales(names=PROJ), ""),
    Case("mixed precision, word for the cache", mixed(**_WORD), scales(names=PROJ), ""),
    Case("quark, no export", QUARKED | {"export": None}, scales(names=QUARK), "refused"),
]  # fmt: skip

# names of cases that are also loaded elsewhere than on one GPU, and on what
_PER_HEAD = [case.name for case in CASES if case.name.startswith("per head")]
_SCALAR = ["one scale per layer, [1]", "modelopt", "modelopt with query scales"]
_FNUZ = ["modelopt, kv_scale", "modelopt, negative", "fp8", "fp8, Quark names", "quark"]
PLACES = [
    (Place(2), [*_PER_HEAD, *_SCALAR, "not in the index"]),
    (Place(4), [*_PER_HEAD, *_SCALAR]),
    (Place(fnuz=True), [*_SCALAR, *_FNUZ, "per head, [H, 1, 1]"]),
]


def write_case(case: Case, directory: Path) -> Path:
    directory.mkdir(parents=True)
    config = MODEL | ({case.key: case.config} if case.config else {})
    (directory / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in LlamaForCausalLM(LlamaConfig(**MODEL)).named_parameters()}
    weights = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    made = case.tensors()
    weights_file = "model-1.safetensors" if case.index else "model.safetensors"
    save_file(weights, directory / weights_file, {"format": "pt"})
    if made:
        save_file(made, directory / "scales.safetensors", {"format": "pt"})
    if case.index:
        listed = dict.fromkeys(weights, "model-1.safetensors")
        listed |= dict.fromkeys(made if case.indexed else (), "scales.safetensors")
        listed |= {f"more.{file}": file for file in case.also_indexed}
        index = {"metadata": {}, "weight_map": listed}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
