"""Quantization configs: how an engine reads scales under one, before it looks at a scale."""

import re
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from calib.engines.catalogue import Engine, Method
from calib.engines.outcome import NotKnown, Refused
from calib.files.cache_type import is_for_nvfp4
from calib.files.model_directory import ModelDirectory

_MIXED = "MIXED_PRECISION"
_NO_CACHE = Method(kind="none", why="its config names no FP8 KV cache, so no layer has a place for scales")


def choose_method(directory: ModelDirectory, engine: Engine) -> Method | None:
    """Return how the engine reads scales under the directory's config, None without; or raise `Refused`."""
    config = directory.quantization
    if config is None:
        return engine.without_method
    name = method_name(directory)
    method = engine.methods.get(name, engine.methods.get("*"))
    if method is None:
        raise Refused(f"quant_method {name[:40]!r} is not one that it reads KV scales under")
    nvfp4 = is_for_nvfp4(directory)
    if nvfp4:
        _check_nvfp4(name, method, engine)
    if method.kind == "none":
        return method
    if method.mixed and directory.algorithms.get("quant_algo") == _MIXED:
        return _mixed_method(directory, method, engine)
    _check_algorithm(directory, method)
    _check_groups(config, need_weights=method.groups_need_weights)
    missing = next((key for key in method.needs if not isinstance(config.get(key), dict)), None)
    if missing:
        raise Refused(f"the quantization config has no '{missing}', which {name} needs")
    if method.cache_group:
        _check_quark_group(config, by_pattern=method.cache_group == "patterns")
    if method.needs_fp8_cache and not nvfp4 and not names_fp8_cache(directory):
        return _NO_CACHE
    if method.needs_fp8_cache and nvfp4 and not _has_nvfp4_place(directory):
        why = "its config has no kv_cache_quant_algo, so no layer has a place for scales"
        return Method(kind="none", why=why)
    scheme = config.get("kv_cache_scheme")
    if method.scheme == "tensor" and not _is_static_tensor(scheme):
        why = "its kv_cache_scheme is not static FP8 with one scale per layer, so scales are ignored"
        return Method(kind="none", why=why)
    if method.scheme in ("both", "either") and scheme is not None:
        _check_scheme(scheme if isinstance(scheme, dict) else {}, needs_both=method.scheme == "both")
    return method


def method_name(directory: ModelDirectory) -> str:
    """Return the `quant_method`; ModelOpt's own file needs none."""
    config = directory.quantization or {}
    return str(config.get("quant_method") or ("modelopt" if _is_own_file(directory) else None))


def names_fp8_cache(directory: ModelDirectory) -> bool:
    """Return whether the config says that the KV cache is FP8, so that engines make it so."""
    algorithms = directory.algorithms
    scheme = algorithms.get("kv_cache_scheme")
    if isinstance(scheme, dict) and algorithms is directory.quantization:
        return scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return str(algorithms.get("kv_cache_quant_algo")).upper() == "FP8"


def turns_fp8_on(directory: ModelDirectory, method: Method) -> bool:
    """Return whether the engine makes the cache FP8 without a flag."""
    scheme = directory.algorithms.get("kv_cache_scheme")
    dynamic = scheme.get("dynamic") if isinstance(scheme, dict) else False
    is_read = dynamic is False or not method.needs_static_scheme
    return method.turns_fp8_on and names_fp8_cache(directory) and is_read


def excluded_by(config: Mapping[str, Any], module: str) -> str | None:
    """Return the entry of a Quark config's `exclude` that takes an attention module out, if one does."""
    entries, name = config.get("exclude"), f"{module}.attn"
    for entry in map(str, entries if isinstance(entries, list) else ()):
        with suppress(re.error):
            if entry == name or (entry.startswith("re:") and re.match(entry.removeprefix("re:"), name)):
                return entry
    return None


def _is_own_file(directory: ModelDirectory) -> bool:
    return directory.quantization is directory.modelopt


def _has_nvfp4_place(directory: ModelDirectory) -> bool:
    """Return whether SGLang has a place; with FP8 weights only kv_cache_quant_algo may announce it."""
    algorithms = directory.algorithms
    if algorithms.get("quant_algo") != "FP8":
        return True
    scheme = algorithms.get("kv_cache_scheme")
    return not isinstance(scheme, dict) and bool(algorithms.get("kv_cache_quant_algo"))


def _check_nvfp4(name: str, method: Method, engine: Engine) -> None:
    """Raise `NotKnown` for values of an NVFP4 cache that were not run; the rules for FP8 do not hold."""
    if engine.nvfp4 is None and method.kind != "none":
        raise NotKnown("not known: it was never run with values for an NVFP4 cache")
    if engine.nvfp4 and name not in engine.nvfp4.methods:
        advice = f"it wants absmax / {engine.nvfp4.divisor}"
        raise NotKnown(f"not known: its NVFP4 cache was never run under {name[:40]}; {advice}")


def _check_algorithm(directory: ModelDirectory, method: Method) -> None:
    """Refuse a config without `quant_algo`; raise `NotKnown` for algorithms that were not run."""
    if not method.algorithms:
        return
    algorithm = directory.algorithms.get("quant_algo")
    if not algorithm:
        problem = "quant_algo is missing or null, as ModelOpt writes it where only the KV cache is quantised"
        raise Refused(f"{problem}; export the scales in another format")
    if algorithm not in method.algorithms:
        raise NotKnown(f"not known with quant_algo {str(algorithm)[:40]!r}: it was never run")
    if directory.algorithms is directory.quantization:
        return
    if not _is_own_file(directory) or directory.producer.get("name") != "modelopt":
        raise NotKnown(
            "not known: engines read a nested config in hf_quant_config.json, by the producer "
            "'modelopt', and do not agree on others; move its keys into config.json"
        )


def _mixed_method(directory: ModelDirectory, method: Method, engine: Engine) -> Method:
    """Return what `method` is under MIXED_PRECISION, where `quantized_layers` says what each layer is."""
    config = directory.algorithms
    if config is not directory.quantization or _is_own_file(directory) or is_for_nvfp4(directory):
        raise NotKnown(f"not known with {_MIXED} in hf_quant_config.json, or an NVFP4 cache")
    layers = config.get("quantized_layers")
    layers = layers if isinstance(layers, dict) else {}
    kinds = [str(layer.get("quant_algo")).upper() for layer in layers.values() if isinstance(layer, dict)]
    if method.mixed == "nvfp4" and not {"NVFP4", "W4A16_NVFP4"} & {*kinds}:
        why = f"{_MIXED} without NVFP4 layers is read as W4AFP8, in which no layer has a place for scales"
        return Method(kind="none", why=why)
    if not layers and directory.modelopt is None:
        raise Refused(f"quant_algo is {_MIXED}, and the config has no 'quantized_layers'")
    if not layers or not config.keys() & {"kv_cache_scheme", "kv_cache_quant_algo"}:
        if method.mixed == "scheme" and layers:
            return _NO_CACHE
        raise NotKnown(f"not known with {_MIXED}: engines read more of it in hf_quant_config.json")
    if method.mixed == "scheme" and engine.class_caches_latents(directory.config):
        why = f"under {_MIXED} layers that cache latents have no place for scales"
        return Method(kind="none", why=why)
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, dict) and not names_fp8_cache(directory):
        raise NotKnown(f"not known with {_MIXED} and a kv_cache_scheme that is not FP8")
    has_place = isinstance(scheme, dict) if method.mixed == "scheme" else names_fp8_cache(directory)
    return method if has_place else _NO_CACHE


def _check_groups(config: Mapping[str, Any], *, need_weights: bool) -> None:
    """Raise `NotKnown` for malformed settings of weights; refuse groups without weights that need some."""
    for key, kind, article in (("config_groups", dict, "an object"), ("ignore", list, "a list")):
        if not isinstance(config.get(key), kind | None):
            raise NotKnown(f"not known: '{key}' of the quantization config is not {article}")
    for name, group in (config.get("config_groups") or {}).items():
        if need_weights and isinstance(group, dict) and not group.get("weights"):
            raise Refused(
                f"config_groups has '{name[:40]}' without weights, as llm-compressor writes it for "
                "queries, and it cannot read that; write it again with fp8kv convert --to vllm"
            )


def _is_static_tensor(scheme: Any) -> bool:
    if not isinstance(scheme, dict) or scheme.get("dynamic"):
        return False
    kind = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    return kind.items() <= scheme.items() and bool(scheme.get("symmetric", True))


def _check_scheme(scheme: Mapping[str, Any], *, needs_both: bool) -> None:
    is_wrong = [scheme.get("type") != "float", scheme.get("num_bits") != 8]
    if all(is_wrong) or (any(is_wrong) and needs_both):
        numbers = f"num_bits {scheme.get('num_bits')}, type {scheme.get('type')}"
        raise Refused(f"kv_cache_scheme has {numbers}; it must be 8 and float")
    if (strategy := scheme.get("strategy")) not in ("tensor", "attn_head"):
        raise Refused(f"kv_cache_scheme has strategy {strategy}; it must be tensor or attn_head")
    if not scheme.get("symmetric"):
        raise Refused("kv_cache_scheme must say symmetric: true")


def _check_quark_group(config: Mapping[str, Any], *, by_pattern: bool) -> None:
    """Refuse a Quark config in which `kv_cache_group` does not say what the cache holds.

    The group names entries of `layer_quant_config`, whose outputs are K and V. By pattern a name with `*`
    stands for several, and only their outputs have to be the same.
    """
    group, layers = config["export"].get("kv_cache_group"), config["layer_quant_config"]
    if group is None:
        raise Refused("export has no 'kv_cache_group', which quark needs; an empty list will do")
    if not isinstance(group, list) or not all(isinstance(name, str) for name in group):
        raise NotKnown("not known: kv_cache_group is not a list of names")
    if not group:
        return
    if by_pattern:
        names = [name for name in layers if any(fnmatchcase(name, pattern) for pattern in group)]
    else:
        names = [name for name in group if name in layers]
    if not names or (not by_pattern and len(names) < len(group)):
        raise Refused(f"kv_cache_group names '{group[0][:40]}', and layer_quant_config has no such entry")
    entries = [layers[name] for name in names]
    outputs = [entry.get("output_tensors") if isinstance(entry, dict) else None for entry in entries]
    compared = outputs if by_pattern else entries
    if any(entry != compared[0] for entry in compared):
        raise Refused("entries of layer_quant_config that kv_cache_group names must be the same")
    output = outputs[0] if isinstance(outputs[0], dict) else {}
    if (kind := (output.get("dtype"), output.get("qscheme"))) != ("fp8_e4m3", "per_tensor"):
        raise Refused(
            f"output_tensors of kv_cache_group are {kind[0]}, {kind[1]}; they must be fp8_e4m3, per_tensor"
        )
