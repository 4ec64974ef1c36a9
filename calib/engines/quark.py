"""What engines want of a Quark config before they look at a scale."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from calib.engines.result import NotKnown, Refused


def check_cache_group(config: Mapping[str, Any], rule: Literal["names", "patterns"]) -> None:
    """Refuse a Quark config in which `kv_cache_group` does not say what the cache holds.

    The group names entries of `layer_quant_config`, whose outputs are K and V. By `patterns` a name
    with `*` stands for several, and only their outputs have to be the same.
    """
    group, layers = config["export"].get("kv_cache_group"), config["layer_quant_config"]
    if group is None:
        raise Refused("export has no 'kv_cache_group', which quark needs; an empty list will do")
    if not isinstance(group, list) or not all(isinstance(name, str) for name in group):
        raise NotKnown("not known: kv_cache_group is not a list of names")
    if not group:
        return
    found = [layers[name] for name in group if name in layers]
    has_all = len(found) == len(group)
    if rule == "patterns":
        found = [layer for name, layer in layers.items() if _is_one_of(name, group)]
        has_all = bool(found)
    if not has_all:
        raise Refused(f"kv_cache_group names '{group[0][:40]}', and layer_quant_config has no such entry")
    outputs = [layer.get("output_tensors") if isinstance(layer, dict) else None for layer in found]
    compared = outputs if rule == "patterns" else found
    if any(each != compared[0] for each in compared):
        raise Refused("entries of layer_quant_config that kv_cache_group names must be the same")
    output = outputs[0] if isinstance(outputs[0], dict) else {}
    said = (output.get("dtype"), output.get("qscheme"))
    if said != ("fp8_e4m3", "per_tensor"):
        raise Refused(
            f"output_tensors of kv_cache_group are {said[0]}, {said[1]}; they must be fp8_e4m3, per_tensor"
        )


def _is_one_of(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def excluded_by(config: Mapping[str, Any], module: str) -> str | None:
    """The entry of `exclude` that takes an attention module out of quantisation, if one does."""
    entries, name = config.get("exclude"), f"{module}.attn"
    for entry in entries if isinstance(entries, list) else ():
        if entry == name or (str(entry).startswith("re:") and _matches(str(entry)[3:], name)):
            return str(entry)
    return None


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False
