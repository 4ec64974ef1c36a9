"""compressed-tensors: `kv_cache_scheme` in `quantization_config`, and scales.

They are called `<attn>.{k,v,q}_scale`, or as the engine's model class loads them.

Read by vLLM and Aphrodite (tensor and attn_head) and by newer SGLang (tensor).
An existing quantization_config is kept; only its KV part is set.
"""

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from calib.engines.catalogue import Engine
from calib.engines.classes import NAMES
from calib.engines.quark import excluded_by
from calib.errors import UnsupportedExportError
from calib.files.config import quantization_configs
from calib.files.model_directory import ModelDirectory
from calib.formats import scales_json
from calib.formats.base import Export, by_prefix, loaded_name
from calib.scales.scales import KVScales

FP8_SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}
# quant_methods whose engines read `<attn>.k_scale` beside them without any scheme in the config
_SCALES_WITHOUT_SCHEME = {"fp8", "quark", "modelopt"}


def compressed_tensors(
    scales: KVScales, checkpoint: ModelDirectory, tp_size: int, *, rules: Engine
) -> Export:
    """Export for the engine of `rules`; refuses weights and classes that rule KV scales out."""
    config = copy.deepcopy(checkpoint.config)
    quantization = find_quantization_config(config)
    method = quantization.get("quant_method") if quantization else None
    notes: tuple[str, ...] = ()
    scheme = FP8_SCHEME | {"strategy": scales.strategy, "symmetric": True}
    if quantization is None:
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "compressed",
            "config_groups": {},  # must be present, though empty: vLLM counts heads only then
            "ignore": [],
            "kv_cache_scheme": scheme,
        }
    elif method == "compressed-tensors":
        quantization["kv_cache_scheme"] = scheme
        quantization.setdefault("config_groups", {})
    elif method in _SCALES_WITHOUT_SCHEME:
        if method == "quark":
            _check_not_excluded(quantization, scales, checkpoint, rules)
        notes = (_beside_quantized(str(method), scales, quantization),)
    else:
        version = "which compressed-tensors' AutoAWQConverter makes" if method == "awq" else "if any"
        raise UnsupportedExportError(
            f"engines have no place for KV scales beside '{method}' weights, their FP8 cache "
            "computes with 1.0 (`fp8kv eval` says what that costs, `fp8kv bake` makes it right "
            "with a calibration of --format fp8kv); or give a compressed-tensors version of this "
            f"model, {version}"
        )
    kind = str(method or "compressed-tensors") + " attn_head" * (scales.strategy == "attn_head")
    name, doubts = loaded_name(rules, scales, checkpoint, kind, NAMES[0])
    return Export(scale_tensors(scales, checkpoint, name), config, notes=notes, doubts=doubts)


def sglang(scales: KVScales, checkpoint: ModelDirectory, tp_size: int, *, rules: Engine) -> Export:
    """Export for SGLang: the checkpoint, and kv_cache_scales.json beside it where it can be."""
    export = compressed_tensors(scales, checkpoint, tp_size, rules=rules)
    try:
        beside = scales_json.scales_json(scales, checkpoint, tp_size)
    except UnsupportedExportError:
        return export  # the scales in the checkpoint are what SGLang loads
    return replace(export, documents=beside.documents, notes=export.notes + beside.notes)


def scale_tensors(scales: KVScales, checkpoint: ModelDirectory, name: str) -> dict[str, Tensor]:
    """Name and shape scales as engines load them: `[1]`, or `[heads, 1, 1]` for attn_head."""
    shape = (1,) if scales.strategy == "tensor" else (-1, 1, 1)
    return {
        name.format(module=prefix, x=which): scale.view(shape)
        for prefix, layer in by_prefix(scales, checkpoint).items()
        for which, scale in layer.items()
    }


def find_quantization_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization_config of a checkpoint, where engines look for it, or None."""
    places = dict(quantization_configs(config))
    found = (places.get(f"{part}quantization_config") for part in ("", "text_config."))
    return next((each for each in found if isinstance(each, dict)), None)


def _check_not_excluded(
    quantization: dict[str, Any], scales: KVScales, checkpoint: ModelDirectory, rules: Engine
) -> None:
    """Refuse a Quark config that takes attention out of quantisation where that drops scales."""
    entries = (excluded_by(quantization, module) for module in by_prefix(scales, checkpoint))
    entry = next(filter(None, entries), None)
    if entry and rules.methods["quark"].exclude_drops:
        raise UnsupportedExportError(
            f"'exclude' of the config has '{entry[:60]}', so {rules.engine}'s attention "
            "has no place for scales; name the linear layers there instead"
        )


def _beside_quantized(method: str, scales: KVScales, quantization: dict[str, Any]) -> str:
    if scales.strategy != "tensor":
        raise UnsupportedExportError(
            f"'{method}' weights allow one KV scale per layer; this calibration has strategy "
            f"'{scales.strategy}'. Use --strategy tensor, or calibrate or convert with --reduce max"
        )
    if method == "modelopt":
        quantization["kv_cache_scheme"] = dict(FP8_SCHEME)
        return "modelopt weights: hf_quant_config.json, if any, is left as it is"
    return f"'{method}' weights: the engine reads the scales only with --kv-cache-dtype fp8"
