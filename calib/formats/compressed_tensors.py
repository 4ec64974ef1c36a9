"""compressed-tensors: `kv_cache_scheme` in `quantization_config`, and scales.

They are called `<attn>.{k,v,q}_scale`, or as the engine's model class loads them. Read by vLLM and
Aphrodite (tensor and attn_head) and by newer SGLang (tensor). An existing quantization_config is kept;
only its KV part is set.
"""

import copy
from dataclasses import replace
from typing import Any

from calib.choices import Strategy
from calib.engines.quantization_config import excluded_by
from calib.errors import UnsupportedExportError
from calib.files.config import find_quantization_config
from calib.formats.base import BAKE, Export, FormatRefusal, ScaledModel, WayOut
from calib.formats.scales_json import scales_json
from calib.formats.tensor_names import name_for_class

FP8_SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}
# quant_methods whose engines read `<attn>.k_scale` beside them without any scheme in the config
_SCALES_WITHOUT_SCHEME = {"fp8", "quark", "modelopt"}


def compressed_tensors(model: ScaledModel) -> Export:
    """Export for the engine; refuse weights and classes that rule KV scales out."""
    config, strategy = copy.deepcopy(model.checkpoint.config), model.scales.strategy
    quantization = find_quantization_config(config)
    method = quantization.get("quant_method") if quantization else None
    notes: tuple[str, ...] = ()
    scheme = FP8_SCHEME | {"strategy": strategy, "symmetric": True}
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
            _check_not_excluded(quantization, model)
        notes = (_announce_beside_weights(str(method), strategy, quantization, model.engine.flag),)
    else:
        version = ", which compressed-tensors' AutoAWQConverter makes" if method == "awq" else ", if any"
        raise FormatRefusal(
            f"engines have no place for KV scales beside '{method}' weights: their FP8 cache computes "
            "with 1.0 (`fp8kv eval` says what that costs)",
            BAKE,
            f"a compressed-tensors version of this model{version}",
        )
    kind = str(method or "compressed-tensors") + (" attn_head" if strategy == "attn_head" else "")
    name, doubts = name_for_class(model, kind)
    shape = (1,) if strategy == "tensor" else (-1, 1, 1)  # [heads, 1, 1], as engines load them
    tensors = {
        name.format(module=prefix, x=letter): scale.view(shape)
        for prefix, layer in model.layers.items()
        for letter, scale in layer.items()
    }
    return Export(tensors, config, notes=notes, doubts=doubts)


def sglang(model: ScaledModel) -> Export:
    """Export for SGLang: the checkpoint, and kv_cache_scales.json beside it where it can be."""
    export = compressed_tensors(model)
    try:
        beside = scales_json(model)
    except UnsupportedExportError:
        return export  # the scales in the checkpoint are what SGLang loads
    return replace(export, documents=beside.documents, notes=export.notes + beside.notes)


def _check_not_excluded(quantization: dict[str, Any], model: ScaledModel) -> None:
    """Refuse a Quark config that takes attention out of quantisation where that drops scales."""
    entry = next(filter(None, (excluded_by(quantization, module) for module in model.layers)), None)
    if entry and model.engine.methods["quark"].exclude_drops:
        raise UnsupportedExportError(
            f"'exclude' of the config has '{entry[:60]}', so {model.engine.engine}'s attention "
            "has no place for scales; name the linear layers there instead"
        )


def _announce_beside_weights(method: str, strategy: Strategy, quantization: dict[str, Any], flag: str) -> str:
    """Set the KV part of a config of quantised weights where it has one; return what to know of it."""
    if strategy != "tensor":
        raise FormatRefusal(
            f"'{method}' weights allow one KV scale per layer; this calibration has strategy '{strategy}'",
            WayOut("strategy", ("tensor",)),
            WayOut("reduce", ("max",)),
        )
    if method == "modelopt":
        quantization["kv_cache_scheme"] = dict(FP8_SCHEME)
        return "modelopt weights: hf_quant_config.json, if any, is left as it is"
    return f"'{method}' weights: the engine reads the scales only with {flag}"
