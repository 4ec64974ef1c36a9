"""Names of scale tensors, taken apart: module, layer, K, V or Q, and the tools that write so."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScaleName:
    """A name of a scale tensor, taken apart."""

    module: str  # the attention module's, in the checkpoint's words
    layer: int
    letters: str  # "k", "v", "q", or "kv" where both share it
    dialect: str  # of `_ENDINGS`


# how a name goes on after the attention module, and the dialect it is; the first that fits
_ENDINGS = [
    (r"\.(?P<which>kv)_scale", "kv_scale"),
    (r"\.(?:k_proj\.(?P<which>k)|v_proj\.(?P<other>v))_scale", "modelopt"),
    (r"\.(?:qkv_proj|qkqkv_proj)\.(?P<which>[kv])_scale", "fused"),
    (r"\.(?P<which>[qkv])_proj\.output_scale", "quark"),
    (r"\.(?P<which>kv|k|v)_cache_scaling_factor", "tensorrt-llm"),
    (r"\.(?:(?P<which>q)|(?P<other>[kv])_cache)\.scale", "hy"),
    (r"\.(?P<which>[qkv])_scale", "compressed-tensors"),
    (r"\.(?P<which>[kv])_global_scale", "auto-round"),  # NVFP4
]
_PATTERNS = [(re.compile(f"(?P<module>.+?){ending}"), dialect) for ending, dialect in _ENDINGS]
_ZERO_POINTS = (".k_zero_point", ".v_zero_point", ".q_zero_point")
# ModelOpt's affine cache: K and V less these
_BIASES = (".k_proj.k_bias", ".v_proj.v_bias")
# towers that attend to what they see or hear, and what joins them to the text, cache nothing
_SENSES = re.compile(r"(?:^|\.)(?:vision|visual|image|audio|speech|vit|multi_modal)\w*\.")
_LAYER = re.compile(r"\.(\d{1,6})(?:\.|$)")


def is_of_cache(name: str) -> bool:
    """Whether a tensor is a scale or offset of K, V or Q, and so says nothing of weights."""
    return name.endswith((*_ZERO_POINTS, *_BIASES)) or parse_scale_name(name) is not None


def is_offset(name: str) -> bool:
    """Whether a tensor is a zero point of K, V or Q, or what is subtracted from K or V."""
    return name.endswith((*_ZERO_POINTS, *_BIASES)) and layer_of(name) is not None


def is_of_senses(name: str) -> bool:
    """Whether a tensor or module belongs to a tower for images or sound."""
    return _SENSES.search(name) is not None


def layer_of(name: str) -> int | None:
    """The layer in the name of a tensor or module: the first number between its dots."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def pattern_of(module: str) -> str:
    """The name without its numbers: `model.layers.N.self_attn`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", module)


def parse_scale_name(name: str) -> ScaleName | None:
    """Take apart the name of a tensor; None if it is no scale of K, V or Q."""
    if not name.endswith(("_scale", ".scale", "_scaling_factor")):
        return None
    layer = layer_of(name)
    if layer is None:
        return None
    for pattern, dialect in _PATTERNS:
        if match := pattern.fullmatch(name):
            found = match.groupdict()
            letters = str(found["which"] or found.get("other"))
            return ScaleName(found["module"], layer, letters, dialect)
    return None
