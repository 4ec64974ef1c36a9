"""ModelOpt: `<attn>.k_proj.k_scale` and `.v_proj.v_scale`, `hf_quant_config.json`.

`trtllm` is what ModelOpt writes for a KV-only calibration. vLLM and SGLang refuse its null
`quant_algo`, so `modelopt` says FP8 and then ignores every weight, which both accept.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from calib.files.config import find_quantization_config
from calib.files.names import MODELOPT_FILE
from calib.formats.base import Export, ScaledModel
from calib.formats.compressed_tensors import FP8_SCHEME
from calib.formats.refusals import BAKE, FormatRefusal, WayOut
from calib.formats.tensor_names import MODELOPT_NAME, name_for_class, name_for_latents

PRODUCER = {"name": "fp8kv"}
_READ_UNDER = ("self_attn", "mixer")


def modelopt(
    model: ScaledModel, *, quant_algo: str | None = "FP8", ignore: str = "*", cache: str = "FP8"
) -> Export:
    """Export for engines that read ModelOpt's config; `ignore` says which weights are not quantised."""
    checkpoint = model.checkpoint
    if find_quantization_config(checkpoint.config) is not None:
        purpose = " for FP8 scales" * (cache != "FP8") + ", which keeps it"
        raise FormatRefusal(
            f"'{checkpoint.path}' already has a quantization_config, which this format would replace",
            BAKE if checkpoint.caches_latents else WayOut("format", ("vllm",), purpose),
        )
    quantization: dict[str, Any] = {
        "quant_method": "modelopt",
        "kv_cache_scheme": dict(FP8_SCHEME),
        "ignore": [ignore],
        "producer": PRODUCER,
    }
    if quant_algo is not None:
        quantization["quant_algo"] = quant_algo
    algorithms = {"quant_algo": quant_algo, "kv_cache_quant_algo": cache, "exclude_modules": [ignore]}
    documents = {MODELOPT_FILE: {"producer": PRODUCER, "quantization": algorithms}}
    if model.scales.latent or checkpoint.caches_latents:
        name, flags = name_for_latents(model.engine, model.layers, checkpoint)
        note = f"these scales are of latents (MLA), for {model.engine.engine} alone"
        if flags:
            note = f"serve with {flags}: {model.engine.engine}'s own class computes with 1.0; {note}"
        export = Export(notes=(note,), flags=flags)
    else:
        name, doubts = name_for_class(model, "modelopt", MODELOPT_NAME)
        export = Export(doubts=doubts)
    if name == MODELOPT_NAME:
        _check_prefixes(model.layers)
    layers = model.layers.items()
    tensors = {name.format(module=module, x=x): getattr(layer, x) for module, layer in layers for x in "kv"}
    config = {**checkpoint.config, "quantization_config": quantization}
    return replace(export, tensors=tensors, config=config, documents=documents)


def _check_prefixes(prefixes: Iterable[str]) -> None:
    for prefix in prefixes:
        if not prefix.endswith(_READ_UNDER):
            places = " or ".join(_READ_UNDER)
            problem = f"engines read k_proj.k_scale only under {places}; this model has '{prefix}'"
            raise FormatRefusal(problem, WayOut("format", ("vllm",)))


trtllm = partial(modelopt, quant_algo=None, ignore="lm_head")
