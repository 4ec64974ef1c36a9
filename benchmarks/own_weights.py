"""How much of K and V a quantised Llama changes by its own k_proj and v_proj, and how much before.

Both models run in float32 on the same tokens.
"""

import statistics
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from calib.model.find import find_checkpoint
from calib.model.load import load_config, load_model
from calib.recipe import load_recipe

States = dict[str, Tensor]  # "<layer>.k", "<layer>.v" -> [B, K, T, D]


def compare_weights(
    original: str, quantised: str, ids: list[list[int]]
) -> tuple[dict[str, float], dict[str, float]]:
    """What K's and V's own weights change of the largest, by layer and letter, less 1; and errors.

    Errors are relative norms, of all K and V, medians over layers.
    """
    base, other = _load(original), _load(quantised)
    was, now = _states(base, base, ids), _states(other, other, ids)
    own = _states(base, other, ids)
    off = {name: float(x.abs().max() / own[name].abs().max()) - 1 for name, x in was.items()}
    errors = {
        f"{letter}_{what}": statistics.median(
            float((found[name] - x).norm() / x.norm())
            for name, x in was.items()
            if name.endswith(letter)
        )
        for letter in "kv"
        for what, found in (("by_own_weights", own), ("by_all_weights", now))
    }
    return off, errors


def _load(name: str) -> PreTrainedModel:
    recipe = load_recipe(None, {"device": "cpu", "dtype": "float32"})
    checkpoint = find_checkpoint(name)
    return load_model(checkpoint, load_config(checkpoint, recipe), recipe).eval()


@torch.inference_mode()
def _states(model: PreTrainedModel, weights: PreTrainedModel, ids: list[list[int]]) -> States:
    """K and V that the projections of `weights` make of the hidden states of `model`."""
    found: States = {}

    def watch(layer: int) -> Any:
        mine, theirs = model.model.layers[layer], weights.model.layers[layer]
        # AWQ and SmoothQuant move factors from the norm into the projections
        moved = theirs.input_layernorm.weight / mine.input_layernorm.weight

        def hook(attention: Any, args: Any, kwargs: Any) -> None:
            hidden, attention = kwargs["hidden_states"] * moved, theirs.self_attn
            heads = (*hidden.shape[:2], -1, attention.head_dim)
            key, value = (
                getattr(attention, name)(hidden).view(heads).transpose(1, 2)
                for name in ("k_proj", "v_proj")
            )
            key, _ = apply_rotary_pos_emb(key, key, *kwargs["position_embeddings"])
            found.update({f"{layer}.k": key, f"{layer}.v": value})

        return mine.self_attn.register_forward_pre_hook(hook, with_kwargs=True)

    handles = [watch(layer) for layer in range(len(model.model.layers))]
    model.model(input_ids=torch.tensor(ids), use_cache=False)
    for handle in handles:
        handle.remove()
    return found
