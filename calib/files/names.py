"""Names of files and tensors: which layer and module a tensor belongs to, and whether it is a scale."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CARD_FILE = "README.md"
# files of fp8kv
CALIBRATION_FILE = "fp8kv_calibration.json"
STATS_FILE = "fp8kv_stats.safetensors"
WATCH_FILE = "fp8kv_watch.json"
STRESS_FILE = "fp8kv_stress.json"
BAKE_FILE = "fp8kv_bake.json"
BAKE_KEY = "fp8kv_bake"  # of config.json: its `for` and `weights`
TEXT_FILE = "fp8kv_text.json"
PACK_FILE = "fp8kv_pack.json"
SOURCE_DIRECTORY = "fp8kv_source"
EVALUATION_DIRECTORY = "evaluation"
SCALES_SHARD = "model-fp8kv-scales.safetensors"
# vLLM 0.4 to 0.6; ModelOpt
JSON_FILE = "kv_cache_scales.json"
MODELOPT_FILE = "hf_quant_config.json"

# how a scale's name goes on after the attention module, and its dialect; the first that fits
_ENDINGS = [
    (r"\.(?P<letters>kv)_scale", "kv_scale"),
    (r"\.(?P<letters>[kv])_proj\.(?P=letters)_scale", "modelopt"),
    (r"\.(?:qkv_proj|qkqkv_proj)\.(?P<letters>[kv])_scale", "fused"),
    (r"\.(?P<letters>[qkv])_proj\.output_scale", "quark"),
    (r"\.(?P<letters>kv|k|v)_cache_scaling_factor", "tensorrt-llm"),
    (r"\.(?P<letters>q(?=\.)|[kv](?=_cache\.))(?:_cache)?\.scale", "hy"),
    (r"\.(?P<letters>[qkv])_scale", "compressed-tensors"),
    (r"\.(?P<letters>[kv])_global_scale", "auto-round"),  # NVFP4
]
_SCALES = [(re.compile(f"(?P<module>.+?){ending}"), dialect) for ending, dialect in _ENDINGS]
# a scale's name but for its spelling; `q.scales` is of the weights of a module `q`
_MISSPELT = re.compile(r".+\.(?:kv|[qkv]|key|value|query)[_-]*(?:cache[_-]*)?scales?[_-]*")
# zero points, and what ModelOpt's affine cache subtracts from K and V
_OFFSETS = (".k_zero_point", ".v_zero_point", ".q_zero_point", ".k_proj.k_bias", ".v_proj.v_bias")
# towers for images and sound, and what joins them to the text: they cache nothing
_TOWER = re.compile(r"(?:^|\.)(?:vision|visual|image|audio|speech|vit|multi_modal)\w*\.")
_LAYER = re.compile(r"\.(\d{1,6})(?:\.|$)")
# weights that only an attention module has, or their codes
_ATTENTION = re.compile(
    r"(?P<module>.+(?<!linear_attn))\.(?:k_proj|kv_b_proj|qkv_proj|query_key_value|c_attn|Wqkv|qkv)"
    r"\.(?:q?weight|weight_packed)"
)
# a layer that attends to the K and V of another one has this alone
_QUERY = re.compile(r"(?P<module>.+)\.q_proj\.(?:q?weight|weight_packed)")
_IN_STACK = re.compile(r"(?P<stack>(?:[^.\d][^.]*\.)*)(?P<layer>\d{1,6})\.(?P<rest>.+)")


def way_back(file: str, *, is_missing: bool = False) -> str:
    """Return advice for a safetensors file that is missing or damaged: ours comes from no server."""
    if file == STATS_FILE:
        return "put it back, or calibrate the model again"
    if file != SCALES_SHARD:
        return "download it again"
    deletion = "" if is_missing else "delete it and "
    return f"put '{file}' back, or {deletion}run fp8kv repair, or calibrate again"


@dataclass(frozen=True, slots=True)
class ScaleName:
    """The parts of a scale tensor's name."""

    module: str  # the attention module, as the checkpoint calls it
    layer: int
    letters: str  # "k", "v", "q", or "kv" where both share it
    dialect: str  # of `_ENDINGS`


def parse_scale_name(name: str) -> ScaleName | None:
    """Return the parts of a tensor's name; None unless it is a scale of K, V or Q."""
    if not name.endswith(("_scale", ".scale", "_scaling_factor")) or (layer := layer_of(name)) is None:
        return None
    for pattern, dialect in _SCALES:
        if match := pattern.fullmatch(name):
            return ScaleName(match["module"], layer, match["letters"], dialect)
    return None


def is_misnamed(name: str) -> bool:
    """Return whether a tensor would be a scale but for spaces and capital letters in its name."""
    plain = "".join(name.split()).lower()
    return plain != name and not parse_scale_name(name) and parse_scale_name(plain) is not None


def is_misspelt(name: str) -> bool:
    """Return whether a name is about a scale's, as `kscale`; a model's own code may have such parameters."""
    plain = "".join(name.split()).lower()
    if "scale" not in plain or layer_of(name) is None or is_of_cache(name):
        return False
    return _MISSPELT.fullmatch(plain) is not None


def is_of_cache(name: str) -> bool:
    """Return whether a tensor is a scale or offset of K, V or Q, so that it is not a weight."""
    return name.endswith(_OFFSETS) or parse_scale_name(name) is not None


def is_offset(name: str) -> bool:
    """Return whether a tensor is a zero point of K, V or Q, or is subtracted from K or V."""
    return name.endswith(_OFFSETS) and layer_of(name) is not None


def is_of_tower(name: str) -> bool:
    """Return whether a tensor or module belongs to a tower for images or sound."""
    return _TOWER.search(name) is not None


def layer_of(name: str) -> int | None:
    """Return the layer of a tensor or module: the first number between dots of its name, 0 of a drafter."""
    match = _LAYER.search(name)
    return int(match[1]) if match else 0 if name.startswith("midlayer.") else None


def pattern_of(module: str) -> str:
    """Return the name without its numbers: `model.layers.N.self_attn`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", module)


def attention_modules(names: Collection[str]) -> set[str]:
    """Return attention modules: those with weights of K, and those that have weights of Q alone.

    The second kind attends to the K and V of another layer; its name has the pattern of the first.
    """
    own, queries = (
        {match["module"] for name in names if (match := pattern.fullmatch(name))}
        for pattern in (_ATTENTION, _QUERY)
    )
    patterns = {pattern_of(module) for module in own}
    own |= {module for module in queries if pattern_of(module) in patterns}
    return {module for module in own if not is_of_tower(module)}


def matches_in_stacks(names: Iterable[str]) -> list[re.Match[str]]:
    """Take the names of modules or weights in layers apart: `stack`, the number `layer`, and `rest`."""
    return [match for name in names if not is_of_cache(name) and (match := _IN_STACK.match(name))]
