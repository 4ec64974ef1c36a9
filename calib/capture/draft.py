"""The layer of a checkpoint that predicts extra tokens (MTP), loaded as far as its attention."""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.generic import ContextManagers

from calib.capture.attention import AttentionMap, Draft
from calib.engines.catalogue import load_catalogue
from calib.engines.model_classes import architecture
from calib.files.model_directory import ModelDirectory
from calib.files.names import layer_of
from calib.models.load import LazyWeight
from calib.models.quantized.detect import is_quantized
from calib.models.quantized.weights import all_weights
from calib.progress import library_bars_hidden

_NOT_NEEDED = (".mlp.", "embed_tokens.", "shared_head.")
# transformers asks for these of MTP layers, where a config has them of others
_KINDS = (("layer_types", "full_attention"), ("mlp_layer_types", "dense"))


def add_draft_layer(
    attention: AttentionMap,
    model: PreTrainedModel,
    checkpoint: ModelDirectory,
    device: torch.device | None = None,
    *,
    is_cut: bool = False,
) -> AttentionMap:
    """Add the MTP layer of a checkpoint, loaded to `device`, or the reason why it is not measured.

    Without a device it goes to that of the model's last layer. `is_cut`: layers at the end are not run.
    """
    modules, name = checkpoint.draft_modules, architecture(checkpoint.config)
    if not modules:
        return attention
    if not any(name in engine.drafts for engine in load_catalogue().values()):
        reason = f"under which names engines load scales of those of {name} is not known"
    elif len(modules) > 1:
        reason = f"there are {len(modules)}, and what the second reads is not known"
    elif is_quantized(model.config):
        reason = "their weights are quantised in a way that only transformers reads"
    elif is_cut:
        reason = "a pass layer by layer ends at the last layer that caches K and V; use --offload none"
    elif isinstance(draft := _load(model, checkpoint, attention, device), Draft):
        return replace(attention, draft=draft)
    else:
        reason = f"the files lack a weight of theirs, '{draft}'; download the model again"
    note = f"layers that draft tokens (MTP) were not measured, and work at scale 1.0: {reason}"
    return replace(attention, note="; ".join(filter(None, (attention.note, note))))


def _load(
    model: PreTrainedModel, checkpoint: ModelDirectory, attention: AttentionMap, device: torch.device | None
) -> Draft | str:
    """Load the draft; return the name of a weight that its files lack."""
    last = [*attention.cached.values()][-1]
    layer: Any = model.get_submodule(last.name.rpartition(".")[0])
    config = deepcopy(model.config.get_text_config(decoder=True))
    config.num_mtp_layers = 1
    for key, kind in _KINDS:
        if getattr(config, key, None) is not None:
            setattr(config, f"mtp_{key}", [kind])
    decoder: Any = model.get_decoder()
    parts = SimpleNamespace(layers=[layer], rotary_emb=decoder.rotary_emb)
    whole: Any = SimpleNamespace(config=config, get_decoder=lambda: parts, lm_head=None)
    whole.get_input_embeddings = model.get_input_embeddings
    with ContextManagers(MtpModel.get_init_context(model.dtype, False, False, None)):
        mtp = MtpModel(whole, 1)
    weights = {
        name: LazyWeight(source)
        for name, source in all_weights(checkpoint, model.dtype).items()
        if checkpoint.is_of_draft(name) and not any(part in name for part in _NOT_NEEDED)
    }
    places = {"": device or next(layer.parameters()).device}
    loading = LoadStateDictConfig(
        device_map=places, dtype=model.dtype, weight_mapping=mtp.get_weight_conversions(model)
    )
    with library_bars_hidden():
        convert_and_load_state_dict_in_model(mtp, weights, loading)
    names = (n for n, x in mtp.named_parameters() if x.is_meta and n.startswith("layers."))
    if missing := next((n for n in names if ".mlp." not in n and "post_norm" not in n), None):
        return str(missing)
    (name,) = checkpoint.draft_modules
    module = replace(last, name=name, layer_idx=layer_of(name) or 0)
    return Draft(mtp.eval(), f"layers.0.mtp_block.{last.name.rpartition('.')[2]}", module)
