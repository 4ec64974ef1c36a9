"""NVFP4: a calibrated value per layer for K and one for V, under ModelOpt's names and config.

There are two conventions. The value is absmax / 448 for vLLM and TensorRT-LLM, and absmax / 2688 for
SGLang; the YAML of an engine says which it wants (`nvfp4.divisor`). docs/formats.md explains the factor of 6.
"""

from dataclasses import replace

from calib.files.cache_type import FP8_DIVISOR, PRODUCER_KEY
from calib.formats.base import Export, ScaledModel
from calib.formats.modelopt import PRODUCER, modelopt


def nvfp4(model: ScaledModel) -> Export:
    """Export the values of an NVFP4 cache as the engine wants them, from FP8 scales (absmax / 448)."""
    divisor = model.engine.nvfp4.divisor if model.engine.nvfp4 else FP8_DIVISOR
    export = modelopt(model, cache="NVFP4")
    tensors = {name: scale / (divisor / FP8_DIVISOR) for name, scale in export.tensors.items()}
    config, producer = dict(export.config or {}), {"producer": PRODUCER | {PRODUCER_KEY: divisor}}
    cache = {"kv_cache_scheme": "NVFP4", "kv_cache_quant_algo": "NVFP4"}
    config["quantization_config"] |= cache | producer
    documents = {name: document | producer for name, document in export.documents.items()}
    return replace(export, tensors=tensors, config=config, documents=documents)
