"""The largest K, V and Q of a model, seen by attention that transformers itself calls."""

import sys

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask


def largest_qkv(model, ids):
    """The largest |K|, |V| and |Q| of each head for the token ids [B, T], by attention module."""
    names, found = {module: name for name, module in model.named_modules()}, {}
    eager = sys.modules[type(model).__module__].eager_attention_forward

    def attend(module, query, key, value, *args, **kwargs):
        states = {"k": key, "v": value, "q": query}
        found[names[module]] = {x: t.abs().amax((0, 2, 3)) for x, t in states.items()}
        return eager(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("measuring", attend)
    AttentionMaskInterface.register("measuring", eager_mask)
    model.set_attn_implementation("measuring")
    with torch.inference_mode():
        model(ids)
    return found
