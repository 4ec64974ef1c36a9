"""Scales of a layer that predicts extra tokens (MTP), beside those of its model."""

from dataclasses import replace

from calib.files.config import find_quantization_config
from calib.formats.base import Export, ScaledModel

DRAFT_LEFT_OUT = "scales of the layer that drafts tokens (MTP) are left out; calibrate again to have them"


def add_draft(export: Export, draft: ScaledModel) -> Export:
    """Add the scales of a draft under the names that the engine's class loads, or say that it loads none."""
    config = export.config or {}
    quantization, engine = find_quantization_config(config) or {}, draft.engine
    kind = f"{quantization.get('quant_method')}{' attn_head' * (draft.scales.strategy == 'attn_head')}"
    names, modules = engine.draft_names(config, kind), " and ".join(draft.layers)
    if not names or quantization.get("kv_cache_quant_algo") == "NVFP4":
        note = (
            f"{engine.engine} is not known to load scales of {modules}, which drafts tokens: it works at 1.0"
        )
        return replace(export, notes=(*export.notes, note))
    shape = (1,) if draft.scales.strategy == "tensor" else (-1, 1, 1)
    tensors = {
        names[0].format(module=module, x=letter): getattr(layer, letter).view(shape)
        for module, layer in draft.layers.items()
        for letter in "kv"
    }
    return replace(export, tensors=export.tensors | tensors)
