"""TGI: scalar `<attn>.kv_scale`, `.k_scale`, `.v_scale`; `kv_cache_torch_dtype` in the config."""

from calib.formats.base import Export, ScaledModel
from calib.formats.tensor_names import name_for_class


def tgi(model: ScaledModel) -> Export:
    """Export for TGI; `kv_scale` is the larger of K's and V's, for versions that know only it."""
    tensors = {}
    for prefix, layer in model.layers.items():
        tensors[f"{prefix}.k_scale"] = layer.k
        tensors[f"{prefix}.v_scale"] = layer.v
        tensors[f"{prefix}.kv_scale"] = layer.k.maximum(layer.v)
    config = {**model.checkpoint.config, "kv_cache_torch_dtype": f"float8_{model.scales.fp8_dtype}"}
    _, doubts = name_for_class(model, "")
    return Export(tensors, config, doubts=doubts)
