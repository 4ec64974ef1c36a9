"""ModelOpt: `<attn>.k_proj.k_scale` and `.v_proj.v_scale`, `hf_quant_config.json`.

`trtllm` is what ModelOpt writes for a KV-only calibration. vLLM and SGLang refuse its null
`quant_algo`, so `modelopt` says FP8 and then ignores every weight, which both accept.
`nvfp4` is that with an NVFP4 cache's values, in the convention that the engine reads.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from calib.engines.catalogue import Engine
from calib.errors import UnsupportedExportError
from calib.files.cache_type import FP8_DIVISOR, PRODUCER_KEY
from calib.files.model_directory import ModelDirectory
from calib.files.names import MODELOPT_FILE
from calib.formats.base import BAKE, Export, by_prefix, latents_name, loaded_name
from calib.formats.compressed_tensors import FP8_SCHEME, find_quantization_config
from calib.scales.scales import KVScales

_PRODUCER = {"name": "fp8kv"}
MODELOPT_NAME = "{module}.{x}_proj.{x}_scale"
_READ_UNDER = ("self_attn", "mixer")


def _export(
    scales: KVScales, checkpoint: ModelDirectory, tp_size: int, *, quant_algo: str | None, ignore: str,
    rules: Engine, cache: str = "FP8",
) -> Export:  # fmt: skip
    if find_quantization_config(checkpoint.config) is not None:
        keeps = "for FP8 scales " * (cache != "FP8") + "use --format vllm, which keeps it"
        raise UnsupportedExportError(
            f"'{checkpoint.path}' already has a quantization_config, which this format would "
            f"replace; {f'use {BAKE}' if checkpoint.caches_latents else keeps}"
        )
    quantization: dict[str, Any] = {
        "quant_method": "modelopt",
        "kv_cache_scheme": dict(FP8_SCHEME),
        "ignore": [ignore],
        "producer": _PRODUCER,
    }
    if quant_algo is not None:
        quantization["quant_algo"] = quant_algo
    document = {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": quant_algo,
            "kv_cache_quant_algo": cache,
            "exclude_modules": [ignore],
        },
    }
    config = {**checkpoint.config, "quantization_config": quantization}
    if scales.latent or checkpoint.caches_latents:
        name, flags = latents_name(
            rules, by_prefix(scales, checkpoint), checkpoint, "modelopt", MODELOPT_NAME
        )
        made = Export(notes=(_latents_note(rules, flags),), flags=flags)
    else:
        name, doubts = loaded_name(rules, scales, checkpoint, "modelopt", MODELOPT_NAME)
        made = Export(doubts=doubts)
    tensors = _tensors(scales, checkpoint, name)
    return replace(made, tensors=tensors, config=config, documents={MODELOPT_FILE: document})


def _latents_note(rules: Engine, flags: str) -> str:
    own = f"serve with {flags}: {rules.engine}'s own class computes with 1.0; " if flags else ""
    return f"{own}these scales are of latents (MLA), for {rules.engine} alone"


def _tensors(scales: KVScales, checkpoint: ModelDirectory, name: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for prefix, layer in by_prefix(scales, checkpoint).items():
        if name == MODELOPT_NAME and not prefix.endswith(_READ_UNDER):
            raise UnsupportedExportError(
                f"engines read k_proj.k_scale only under {' or '.join(_READ_UNDER)}; this model "
                f"has '{prefix}'. Use --format vllm"
            )
        tensors |= {name.format(module=prefix, x=x): getattr(layer, x) for x in "kv"}
    return tensors


def nvfp4(scales: KVScales, checkpoint: ModelDirectory, tp_size: int, *, rules: Engine) -> Export:
    """Export the values of an NVFP4 cache as the engine of `rules` wants them.

    `scales` are those of FP8: absmax / 448.
    """
    divisor = rules.nvfp4.divisor if rules.nvfp4 else FP8_DIVISOR
    made = _export(scales, checkpoint, tp_size, quant_algo="FP8", ignore="*", rules=rules, cache="NVFP4")
    tensors = {name: scale / (divisor / FP8_DIVISOR) for name, scale in made.tensors.items()}
    config = made.config or {}
    said = {"kv_cache_scheme": "NVFP4", "kv_cache_quant_algo": "NVFP4"}
    producer = {"producer": _PRODUCER | {PRODUCER_KEY: divisor}}
    config["quantization_config"] |= said | producer
    documents = {name: document | producer for name, document in made.documents.items()}
    return replace(made, tensors=tensors, config=config, documents=documents)


modelopt = partial(_export, quant_algo="FP8", ignore="*")
trtllm = partial(_export, quant_algo=None, ignore="lm_head")
