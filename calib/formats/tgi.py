"""TGI: scalar `<attn>.kv_scale`, `.k_scale`, `.v_scale`; `kv_cache_torch_dtype` in the config."""

from calib.engines.catalogue import Engine
from calib.engines.classes import NAMES
from calib.files.model_directory import ModelDirectory
from calib.formats.base import Export, by_prefix, loaded_name
from calib.scales.scales import KVScales


def tgi(scales: KVScales, checkpoint: ModelDirectory, tp_size: int, *, rules: Engine) -> Export:
    """Export for TGI; `kv_scale` is the larger of K's and V's, for versions that know only it."""
    tensors = {}
    for prefix, layer in by_prefix(scales, checkpoint).items():
        tensors[f"{prefix}.k_scale"] = layer.k
        tensors[f"{prefix}.v_scale"] = layer.v
        tensors[f"{prefix}.kv_scale"] = layer.k.maximum(layer.v)
    config = {**checkpoint.config, "kv_cache_torch_dtype": f"float8_{scales.fp8_dtype}"}
    _, doubts = loaded_name(rules, scales, checkpoint, "", NAMES[0])
    return Export(tensors, config, doubts=doubts)
