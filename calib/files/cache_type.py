"""The cache that stored scales are for, as their files say: FP8 of which type, or NVFP4 of which convention.

NVFP4 holds x ≈ code * block scale * value: codes up to 6, block scales in E4M3 up to 448, made at run time
for 16 numbers each. The value is calibrated; tools and engines differ by a factor of 6.
"""

import re
from typing import Any, Literal, NamedTuple

from packaging.version import Version

from calib.choices import FP8Name
from calib.errors import InputError
from calib.files.model_directory import ModelDirectory
from calib.files.names import JSON_FILE
from calib.files.skipped_layers import MAP_KEY, skipped_layers

FP8_MAX: dict[FP8Name, float] = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0}
FP8_SMALLEST: dict[FP8Name, float] = {"e4m3fn": 2**-9, "e4m3fnuz": 2**-10, "e5m2": 2**-16}
_FP8_WORDS: dict[str, FP8Name] = {f"float8_{name}": name for name in FP8_MAX}
_FP8_WORDS |= {"fp8_e4m3": "e4m3fn", "fp8_e5m2": "e5m2"}
_ANY_FP8_WORDS = ("float of 8 bits", "FP8")
_NVFP4_WORDS = ("NVFP4", "float of 4 bits")

Divisor = Literal[448, 2688]  # the value for an NVFP4 cache is absmax / this
FP8_DIVISOR: Divisor = 448  # the value is an FP8 scale: codes times block scales use part of E4M3
BLOCK_DIVISOR: Divisor = 2688  # 448 * 6: block scales use all of E4M3
PRODUCER_KEY = "nvfp4_kv_divisor"  # in what our exports say of their producer
# ModelOpt #790; before, its exporter wrote absmax / 2688
_MODELOPT_CHANGED = Version("0.42")


class Convention(NamedTuple):
    """The divisor of a directory's values for an NVFP4 cache, None if not known, and the evidence."""

    divisor: Divisor | None
    evidence: str

    def __str__(self) -> str:
        values = f"absmax / {self.divisor}" if self.divisor else "absmax / 448 or absmax / 2688"
        return f"{values} ({self.evidence})"


def fp8_type(directory: ModelDirectory) -> FP8Name:
    """Return the FP8 type that scales are for; raise an InputError where they are for an NVFP4 cache."""
    words = _type_words(directory)
    if is_for_nvfp4(directory):
        raise InputError(
            f"the scales in '{directory.path}' are for an NVFP4 cache, not for FP8; "
            "make FP8 scales of them with fp8kv convert, or calibrate again"
        )
    types = dict[str, FP8Name]()
    for place, word in words.items():
        if word in _FP8_WORDS:
            types[f"{place[:80]} {word}"] = _FP8_WORDS[word]
        elif word not in _ANY_FP8_WORDS:
            problem = f"'{directory.path}': {place[:80]} is '{word[:40]}'"
            raise InputError(f"{problem}; scales are read for {', '.join(_FP8_WORDS)}")
    if len({*types.values()}) > 1:
        raise InputError(
            f"'{directory.path}': its files contradict each other on the FP8 type of the scales "
            f"({' and '.join(types)}); remove what is not about these scales"
        )
    return next(iter(types.values()), "e4m3fn")


def is_for_nvfp4(directory: ModelDirectory) -> bool:
    """Return whether a file says that the values are for an NVFP4 cache."""
    return any(word in _NVFP4_WORDS for word in _type_words(directory).values())


def asks_for_heads(directory: ModelDirectory) -> bool:
    """Return whether the config says that there is a scale per KV head, in vLLM's words."""
    scheme = (directory.quantization or {}).get("kv_cache_scheme")
    return isinstance(scheme, dict) and scheme.get("strategy") == "attn_head"


def nvfp4_convention(directory: ModelDirectory) -> Convention | None:
    """Return the convention that a directory's files tell; None where they hold FP8 scales."""
    if not is_for_nvfp4(directory):
        return None
    if not all(word in _NVFP4_WORDS for word in _type_words(directory).values()):
        return Convention(None, "not known: its files name FP8 as well")
    if any(tensor.parsed.dialect == "auto-round" for tensor in directory.tensors):
        return Convention(BLOCK_DIVISOR, "k_global_scale is AutoRound's name")
    producer = directory.producer
    name, divisor = producer.get("name"), producer.get(PRODUCER_KEY)
    if name == "fp8kv" and divisor in (FP8_DIVISOR, BLOCK_DIVISOR):
        return Convention(divisor, "fp8kv wrote it so")
    if name == "modelopt" and (version := parse_release(producer.get("version"))):
        reason = f"ModelOpt {version} writes it so"
        if version < _MODELOPT_CHANGED:
            return Convention(BLOCK_DIVISOR, reason)
        megatron = "from Megatron, absmax / 2688: compare with verify --against STATS"
        return Convention(FP8_DIVISOR, f"{reason} from Hugging Face models; {megatron}")
    return Convention(None, "not known: no file says who wrote them; verify --against STATS tells")


def parse_release(version: object) -> Version | None:
    """Return the numbers of a producer's version, 0.42.0 of `0.42.0rc1`; None if it has none."""
    match = re.match(r"[0-9]{1,9}\.[0-9]{1,9}(?:\.[0-9]{1,9})?", str(version))
    return Version(match[0]) if match else None


def _type_words(directory: ModelDirectory) -> dict[str, str]:
    """Return the words for a type of cache in a directory's files, by the place of each."""
    config = directory.quantization or {}
    dtype = directory.config.get("kv_cache_torch_dtype")
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        scheme = f"{scheme.get('type')} of {scheme.get('num_bits')} bits"
    algorithm = directory.algorithms.get("kv_cache_quant_algo")
    if MAP_KEY in directory.algorithms:
        skipped_layers(directory)  # refuses other types than FP8
        algorithm = "FP8"
    words = {
        "kv_cache_torch_dtype of config.json": dtype and str(dtype).removeprefix("torch."),
        f"dtype of {JSON_FILE}": directory.json and directory.json.dtype,
        **{f"the name '{t.name}'": "NVFP4" for t in directory.tensors if t.parsed.dialect == "auto-round"},
        "kv_cache_quant_algo": algorithm,
        "kv_cache_scheme": scheme,
        **_quark_words(config),
    }
    return {place: str(word) for place, word in words.items() if word is not None}


def _quark_words(config: dict[str, Any]) -> dict[str, Any]:
    words = {}
    for key in ("kv_cache_quant_config", "layer_quant_config"):
        layers = config.get(key)
        for name, layer in layers.items() if isinstance(layers, dict) else ():
            output = layer.get("output_tensors") if isinstance(layer, dict) else None
            if isinstance(output, dict):
                words[f"{key} of '{name}'"] = output.get("dtype")
    return words
