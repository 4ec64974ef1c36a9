"""Formats with a number for K and V together: `kv_cache_scales.json`, and `kv_scale` of TGI.

The document is for vLLM <= 0.6, Aphrodite <= 0.6 and SGLang; it has a number per layer and rank.
"""

from typing import Any

from calib.errors import UnsupportedExportError
from calib.files.config import can_be_split, head_count, layer_config
from calib.files.model_directory import ModelDirectory
from calib.files.names import JSON_FILE
from calib.formats.base import Export, FormatRefusal, ScaledModel, WayOut
from calib.formats.tensor_names import name_for_class
from calib.scales.scales import KVScales


def scales_json(model: ScaledModel) -> Export:
    """Export the JSON alone, which engines take beside the unchanged model; refuse a config without sizes."""
    scales, checkpoint = model.scales, model.checkpoint
    model_type, num_layers = checkpoint.text_config.get("model_type"), checkpoint.num_layers
    if not isinstance(model_type, str) or num_layers is None:
        raise FormatRefusal(
            f"{JSON_FILE} needs model_type and the number of layers, which the config of "
            f"'{checkpoint.path}' lacks",
            WayOut("format", ("vllm", "tgi")),
        )
    check_split(checkpoint, model.tp_size)
    missing = num_layers - len({layer.layer_idx for layer in scales.expand_shared().values()})
    if missing < 0:
        problem = f"config.json of '{checkpoint.path}' says {num_layers} layers, and there are scales of more"
        raise FormatRefusal(f"{problem}; download the model again")
    notes = []
    if missing:
        notes.append(f"{JSON_FILE}: {missing} layers cache no K and V; they are listed with 1.0, unused")
    pairs = [(layer.k.max(), layer.v.max()) for layer in scales.layers.values()]
    times_too_large = max((float(max(pair) / min(pair)) for pair in pairs), default=1.0)
    if times_too_large > 1:
        notes.append(
            f"{JSON_FILE} has one number a layer, the larger scale of K and V: for the other it is "
            f"up to {times_too_large:.3g} times too large"
        )
    document = scales_document(scales, model_type, num_layers, model.tp_size)
    return Export(documents={JSON_FILE: document}, notes=tuple(notes))


def check_split(checkpoint: ModelDirectory, ranks: int) -> None:
    """Refuse a number of ranks that engines do not start with."""
    for layer in range(checkpoint.num_layers or 0):
        config = layer_config(checkpoint.text_config, layer)
        heads, kv_heads = head_count(config, "q"), head_count(config, "k")
        if heads and kv_heads and not can_be_split(heads, kv_heads, ranks):
            raise UnsupportedExportError(
                f"--tp-size {ranks}: the model's {heads} query heads and {kv_heads} KV heads "
                f"cannot be split evenly over {ranks} ranks; give as many as engines are to have"
            )


def scales_document(scales: KVScales, model_type: str, num_layers: int, tp_size: int = 1) -> dict[str, Any]:
    """Return the JSON object: of each layer the larger of its K and V scale, for `tp_size` ranks."""
    layers = scales.expand_shared().values()
    largest = {layer.layer_idx: float(layer.k.maximum(layer.v)) for layer in layers}
    # its loaders want every layer index, also of layers that cache no K and V
    factors = {str(index): largest.get(index, 1.0) for index in range(num_layers)}
    return {
        "model_type": model_type,
        "kv_cache": {
            "dtype": f"float8_{scales.fp8_dtype}",
            "scaling_factor": {str(rank): factors for rank in range(tp_size)},
        },
    }


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
