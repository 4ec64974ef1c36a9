"""TGI: scalar `<attn>.kv_scale`, `.k_scale`, `.v_scale`; `kv_cache_torch_dtype` in the config."""

from calib.export.base import Export, by_prefix
from calib.model.checkpoint import Checkpoint
from calib.scales.scales import KVScales


def tgi(scales: KVScales, checkpoint: Checkpoint, tp_size: int) -> Export:
    """Export for TGI; `kv_scale` is the larger of K's and V's, for versions that know only it."""
    tensors = {}
    for prefix, layer in by_prefix(scales, checkpoint).items():
        tensors[f"{prefix}.k_scale"] = layer.k
        tensors[f"{prefix}.v_scale"] = layer.v
        tensors[f"{prefix}.kv_scale"] = layer.k.maximum(layer.v)
    config = {**checkpoint.config, "kv_cache_torch_dtype": f"float8_{scales.fp8_dtype}"}
    return Export(tensors, config)
