"""ModelOpt: `<attn>.k_proj.k_scale` and `.v_proj.v_scale`, `hf_quant_config.json`.

`trtllm` is what ModelOpt writes for a KV-only calibration. vLLM and SGLang refuse its null
`quant_algo`, so `modelopt` says FP8 and then ignores every weight, which both accept.

`nvfp4` has a calibrated value per layer for K and one for V in place of scales, in one of two conventions:
absmax / 448 for vLLM and TensorRT-LLM, absmax / 2688 for SGLang. The YAML of an engine says which it
wants (`nvfp4.divisor`), and docs/formats.md explains the factor of 6.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from calib.files.cache_type import FP8_DIVISOR, PRODUCER_KEY
from calib.files.config import find_quantization_config
from calib.files.names import MODELOPT_FILE
from calib.formats.base import BAKE, Export, FormatRefusal, ScaledModel, WayOut
from calib.formats.compressed_tensors import FP8_SCHEME
from calib.formats.tensor_names import MODELOPT_NAME, name_for_class, name_for_latents

_PRODUCER = {"name": "fp8kv"}
_READ_UNDER = ("self_attn", "mixer")


def modelopt(
    model: ScaledModel, *, quant_algo: str | None = "FP8", ignore: str = "*", cache: str = "FP8"
) -> Export:
    """Export for engines that read ModelOpt's config; `ignore` names the weights that are not quantised."""
    checkpoint = model.checkpoint
    if find_quantization_config(checkpoint.config) is not None:
        purpose = ", which keeps it" if cache == "FP8" else " for FP8 scales, which keeps it"
        raise FormatRefusal(
            f"'{checkpoint.path}' already has a quantization_config, which this format would replace",
            BAKE if checkpoint.caches_latents else WayOut("format", ("vllm",), purpose),
        )
    quantization: dict[str, Any] = {
        "quant_method": "modelopt",
        "kv_cache_scheme": dict(FP8_SCHEME),
        "ignore": [ignore],
        "producer": _PRODUCER,
    }
    if quant_algo is not None:
        quantization["quant_algo"] = quant_algo
    algorithms = {"quant_algo": quant_algo, "kv_cache_quant_algo": cache, "exclude_modules": [ignore]}
    documents = {MODELOPT_FILE: {"producer": _PRODUCER, "quantization": algorithms}}
    if model.scales.latent or checkpoint.caches_latents:
        name, flags = name_for_latents(model.engine, model.layers, checkpoint)
        note = f"these scales are of latents (MLA), for {model.engine.engine} alone"
        if flags:
            note = f"serve with {flags}: {model.engine.engine}'s own class computes with 1.0; {note}"
        export = Export(notes=(note,), flags=flags)
    else:
        name, doubts = name_for_class(model, "modelopt", MODELOPT_NAME)
        export = Export(doubts=doubts)
    strange = [module for module in model.layers if not module.endswith(_READ_UNDER)]
    if name == MODELOPT_NAME and strange:
        places = " or ".join(_READ_UNDER)
        problem = f"engines read k_proj.k_scale only under {places}; this model has '{strange[0]}'"
        raise FormatRefusal(problem, WayOut("format", ("vllm",)))
    layers = model.layers.items()
    tensors = {name.format(module=module, x=x): getattr(layer, x) for module, layer in layers for x in "kv"}
    config = {**checkpoint.config, "quantization_config": quantization}
    return replace(export, tensors=tensors, config=config, documents=documents)


trtllm = partial(modelopt, quant_algo=None, ignore="lm_head")


def nvfp4(model: ScaledModel) -> Export:
    """Export the values of an NVFP4 cache as the engine wants them, from FP8 scales (absmax / 448)."""
    divisor = model.engine.nvfp4.divisor if model.engine.nvfp4 else FP8_DIVISOR
    export = modelopt(model, cache="NVFP4")
    tensors = {name: scale / (divisor / FP8_DIVISOR) for name, scale in export.tensors.items()}
    config, producer = dict(export.config or {}), {"producer": _PRODUCER | {PRODUCER_KEY: divisor}}
    cache = {"kv_cache_scheme": "NVFP4", "kv_cache_quant_algo": "NVFP4"}
    config["quantization_config"] |= cache | producer
    documents = {name: document | producer for name, document in export.documents.items()}
    return replace(export, tensors=tensors, config=config, documents=documents)
