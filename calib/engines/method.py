"""What a directory's quantization config makes an engine do, before any scale is looked at."""

from typing import Any

from calib.engines.catalogue import Engine, Method
from calib.engines.quark import check_cache_group
from calib.engines.result import NotKnown, Refused
from calib.files.cache_type import is_for_nvfp4
from calib.files.model_directory import ModelDirectory

IGNORED_SCHEME = Method(
    kind="none",
    why="its kv_cache_scheme is not static FP8 with one scale per layer, so scales are ignored",
)
IGNORED_NVFP4 = Method(
    kind="none",
    why="its config has no kv_cache_quant_algo, so no layer has a place for scales",
)
IGNORED_CACHE = Method(
    kind="none", why="its config names no FP8 KV cache, so no layer has a place for scales"
)
IGNORED_MIXED = Method(
    kind="none",
    why="MIXED_PRECISION without NVFP4 layers is read as W4AFP8, in which no layer has a place for scales",
)
IGNORED_LATENTS = Method(
    kind="none",
    why="under MIXED_PRECISION layers that cache latents have no place for scales",
)
_MIXED = "MIXED_PRECISION"
_NVFP4_LAYERS = ("NVFP4", "W4A16_NVFP4")


def choose_method(directory: ModelDirectory, rules: Engine) -> Method | None:
    """How the engine reads scales under the config; None where there is none."""
    config = directory.quantization
    if config is None:
        return rules.without_method
    name = method_name(directory)
    method = rules.methods.get(name, rules.methods.get("*"))
    if method is None:
        raise Refused(f"quant_method {name[:40]!r} is not one that it reads KV scales under")
    nvfp4 = is_for_nvfp4(directory)
    if nvfp4:
        _check_nvfp4(name, method, rules)
    if method.kind == "none":
        return method
    if method.mixed and directory.algorithms.get("quant_algo") == _MIXED:
        return _mixed_method(directory, method, rules)
    _check_algorithm(directory, method)
    missing = next((key for key in method.needs if not isinstance(config.get(key), dict)), None)
    if missing:
        raise Refused(f"the quantization config has no '{missing}', which {name} needs")
    if method.cache_group:
        check_cache_group(config, method.cache_group)
    groups = config.get("config_groups")
    if method.groups_need_weights and isinstance(groups, dict):
        _check_groups(groups)
    if method.needs_fp8_cache and not nvfp4 and not names_fp8_cache(directory):
        return IGNORED_CACHE
    if method.needs_fp8_cache and nvfp4 and not _has_nvfp4_place(directory):
        return IGNORED_NVFP4
    scheme = config.get("kv_cache_scheme")
    if method.scheme == "tensor":
        return method if _is_static_tensor(scheme) else IGNORED_SCHEME
    if method.scheme:
        _check_scheme(scheme, method.scheme)
    return method


def method_name(directory: ModelDirectory) -> str:
    """The `quant_method`; ModelOpt's own file needs none."""
    config = directory.quantization or {}
    return str(config.get("quant_method") or ("modelopt" if _is_own_file(directory) else None))


def names_fp8_cache(directory: ModelDirectory) -> bool:
    """Whether the config says that the KV cache is FP8, so that engines make it so."""
    algorithms = directory.algorithms
    scheme = algorithms.get("kv_cache_scheme")
    if isinstance(scheme, dict) and algorithms is directory.quantization:
        return scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return str(algorithms.get("kv_cache_quant_algo")).upper() == "FP8"


def turns_fp8_on(directory: ModelDirectory, method: Method) -> bool:
    """Whether the engine makes the cache FP8 without a flag."""
    scheme = directory.algorithms.get("kv_cache_scheme")
    dynamic = scheme.get("dynamic") if isinstance(scheme, dict) else False
    is_read = dynamic is False or not method.static_alone
    return method.turns_fp8_on and names_fp8_cache(directory) and is_read


def _has_nvfp4_place(directory: ModelDirectory) -> bool:
    """Whether SGLang's layers get a place: beside FP8 weights the word must be under this key."""
    algorithms = directory.algorithms
    if algorithms.get("quant_algo") != "FP8":
        return True
    scheme = algorithms.get("kv_cache_scheme")
    return not isinstance(scheme, dict) and bool(algorithms.get("kv_cache_quant_algo"))


def _is_own_file(directory: ModelDirectory) -> bool:
    return directory.quantization is directory.modelopt


def _check_algorithm(directory: ModelDirectory, method: Method) -> None:
    """Refuse a config without `quant_algo`; of those that were not run, nothing is known."""
    if not method.algorithms:
        return
    algorithm = directory.algorithms.get("quant_algo")
    if not algorithm:
        raise Refused(
            "quant_algo is missing or null, as ModelOpt writes it where only the KV cache is "
            "quantised; export the scales in another format"
        )
    if algorithm not in method.algorithms:
        raise NotKnown(f"not known with quant_algo {str(algorithm)[:40]!r}: it was never run")
    if directory.algorithms is directory.quantization:
        return
    producer = (directory.quantization or {}).get("producer")
    name = producer.get("name") if isinstance(producer, dict) else None
    if not _is_own_file(directory) or name != "modelopt":
        raise NotKnown(
            "not known: engines read a nested config in hf_quant_config.json, by the producer "
            "'modelopt', and do not agree on others; move its keys into config.json"
        )


def _mixed_method(directory: ModelDirectory, method: Method, rules: Engine) -> Method:
    """What `method` is under MIXED_PRECISION, where `quantized_layers` says what each layer is."""
    config = directory.algorithms
    if config is not directory.quantization or _is_own_file(directory) or is_for_nvfp4(directory):
        raise NotKnown(f"not known with {_MIXED} in hf_quant_config.json, or an NVFP4 cache")
    layers = config.get("quantized_layers")
    layers = layers if isinstance(layers, dict) else {}
    if method.mixed == "nvfp4" and not any(map(_is_nvfp4, layers.values())):
        return IGNORED_MIXED
    if not layers and directory.modelopt is None:
        raise Refused(f"quant_algo is {_MIXED}, and the config has no 'quantized_layers'")
    if not layers or not config.keys() & {"kv_cache_scheme", "kv_cache_quant_algo"}:
        if method.mixed == "scheme" and layers:
            return IGNORED_CACHE
        raise NotKnown(f"not known with {_MIXED}: engines read more of it in hf_quant_config.json")
    if method.mixed == "scheme" and rules.class_caches_latents(directory.config):
        return IGNORED_LATENTS
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, dict) and not names_fp8_cache(directory):
        raise NotKnown(f"not known with {_MIXED} and a kv_cache_scheme that is not FP8")
    has_place = isinstance(scheme, dict) if method.mixed == "scheme" else names_fp8_cache(directory)
    return method if has_place else IGNORED_CACHE


def _is_nvfp4(layer: Any) -> bool:
    return isinstance(layer, dict) and str(layer.get("quant_algo")).upper() in _NVFP4_LAYERS


def _check_nvfp4(name: str, method: Method, rules: Engine) -> None:
    """Say of values for an NVFP4 cache what is not known; FP8's rules do not hold for them."""
    if rules.nvfp4 is None:
        if method.kind != "none":
            raise NotKnown("not known: it was never run with values for an NVFP4 cache")
    elif name not in rules.nvfp4.methods:
        raise NotKnown(
            f"not known: its NVFP4 cache was never run under {name[:40]}; it wants absmax / "
            f"{rules.nvfp4.divisor}"
        )


def _check_groups(groups: dict[str, Any]) -> None:
    for name, group in groups.items():
        if isinstance(group, dict) and not group.get("weights"):
            raise Refused(
                f"config_groups has '{name[:40]}' without weights, as llm-compressor writes it for "
                "queries, and it cannot read that; write it again with fp8kv convert --to vllm"
            )


def _is_static_tensor(scheme: Any) -> bool:
    wanted = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    if not isinstance(scheme, dict) or scheme.get("dynamic"):
        return False
    return wanted.items() <= scheme.items() and bool(scheme.get("symmetric", True))


def _check_scheme(scheme: Any, rule: str) -> None:
    if scheme is None:
        return
    scheme = scheme if isinstance(scheme, dict) else {}
    wrong = [scheme.get("type") != "float", scheme.get("num_bits") != 8]
    if all(wrong) or (any(wrong) and rule == "both"):
        raise Refused(
            f"kv_cache_scheme has num_bits {scheme.get('num_bits')}, type {scheme.get('type')}; "
            "it must be 8 and float"
        )
    if (strategy := scheme.get("strategy")) not in ("tensor", "attn_head"):
        raise Refused(f"kv_cache_scheme has strategy {strategy}; it must be tensor or attn_head")
    if not scheme.get("symmetric"):
        raise Refused("kv_cache_scheme must say symmetric: true")
