"""The type of cache that scales in a directory are for, as its files say: FP8, or NVFP4."""

from collections.abc import Iterator
from typing import Any

from calib.choices import FP8Name
from calib.errors import InputError
from calib.files.model_directory import ModelDirectory
from calib.files.names import JSON_FILE

FP8_MAX: dict[FP8Name, float] = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0}
FP8_SMALLEST: dict[FP8Name, float] = {"e4m3fn": 2**-9, "e4m3fnuz": 2**-10, "e5m2": 2**-16}
_TYPES: dict[str, FP8Name] = {f"float8_{name}": name for name in FP8_MAX}
_TYPES |= {"fp8_e4m3": "e4m3fn", "fp8_e5m2": "e5m2"}
_NVFP4 = ("NVFP4", "float of 4 bits")
# FP8 of a kind that is not named: compatible with all
_ANY = ("float of 8 bits", "FP8")


def fp8_type(directory: ModelDirectory) -> FP8Name:
    """The FP8 type that scales are for; an InputError where they are for an NVFP4 cache."""
    said = {where: word for where, word in _said(directory) if word not in _ANY}
    if names_nvfp4(directory):
        raise InputError(
            f"'{directory.path}' holds values for an NVFP4 cache, no FP8 scales; write them as FP8 "
            "scales with fp8kv convert, or calibrate again"
        )
    for where, word in said.items():
        if word not in _TYPES:
            wrong = f"'{directory.path}': {where} is '{word[:40]}'"
            raise InputError(f"{wrong}; scales are read for {', '.join(_TYPES)}")
    if len({_TYPES[word] for word in said.values()}) > 1:
        each = " and ".join(f"{where} {word}" for where, word in said.items())
        raise InputError(
            f"'{directory.path}': its files contradict each other on the FP8 type of the scales "
            f"({each}); remove what is not about these scales"
        )
    return next((_TYPES[word] for word in said.values()), "e4m3fn")


def names_nvfp4(directory: ModelDirectory) -> bool:
    """Whether a file says that the values are for an NVFP4 cache."""
    return any(word in _NVFP4 for _, word in _said(directory))


def names_only_nvfp4(directory: ModelDirectory) -> bool:
    """Whether every file that names a type says so."""
    return all(word in _NVFP4 for _, word in _said(directory))


def _said(directory: ModelDirectory) -> Iterator[tuple[str, str]]:
    """Where a type is named, and the word for it."""
    named = (directory.config or {}).get("kv_cache_torch_dtype")
    if named is not None:
        yield "kv_cache_torch_dtype of config.json", str(named).removeprefix("torch.")
    if directory.json and directory.json.dtype is not None:
        yield f"dtype of {JSON_FILE}", directory.json.dtype
    if named := next((t for t in directory.tensors if t.parsed.dialect == "auto-round"), None):
        yield f"the name '{named.name}'", "NVFP4"
    config = directory.quantization or {}
    algorithm = directory.algorithms.get("kv_cache_quant_algo")
    if algorithm is not None:
        yield "kv_cache_quant_algo", str(algorithm)
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        yield "kv_cache_scheme", f"{scheme.get('type')} of {scheme.get('num_bits')} bits"
    elif scheme is not None:
        yield "kv_cache_scheme", str(scheme)
    yield from _quark(config)


def _quark(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("kv_cache_quant_config", "layer_quant_config"):
        layers = config.get(key)
        for name, layer in layers.items() if isinstance(layers, dict) else ():
            output = layer.get("output_tensors") if isinstance(layer, dict) else None
            if isinstance(output, dict) and output.get("dtype") is not None:
                yield f"{key} of '{name[:40]}'", str(output["dtype"])
