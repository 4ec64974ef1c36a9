"""TGI: scalar `<attn>.kv_scale`, `.k_scale`, `.v_scale`; `kv_cache_torch_dtype` in the config."""

from calib.engines.catalogue import Engine
from calib.engines.classes import NAMES
from calib.files.model_directory import ModelDirectory
from calib.formats.base import Export, scales_by_prefix
from calib.formats.tensor_names import name_for_class
from calib.scales.scales import KVScales


def tgi(scales: KVScales, checkpoint: ModelDirectory, engine: Engine, tp_size: int) -> Export:
    """Export for TGI; `kv_scale` is the larger of K's and V's, for versions that know only it."""
    layers, tensors = scales_by_prefix(scales, checkpoint), {}
    for prefix, layer in layers.items():
        tensors[f"{prefix}.k_scale"] = layer.k
        tensors[f"{prefix}.v_scale"] = layer.v
        tensors[f"{prefix}.kv_scale"] = layer.k.maximum(layer.v)
    config = {**checkpoint.config, "kv_cache_torch_dtype": f"float8_{scales.fp8_dtype}"}
    _, doubts = name_for_class(engine, layers, checkpoint, "", NAMES[0])
    return Export(tensors, config, doubts=doubts)
