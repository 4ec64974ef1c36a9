"""Memory of a pass over the layers: weights, activations, hidden states."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from calib.data import Batch
from calib.errors import InputError
from calib.measure.attention import AttentionMap
from calib.offload.stages import Stages
from calib.recipe import Recipe
from calib.scales.derive import recipe_observer
from calib.scales.observers import NUM_BINS
from calib.sizes import show_size

# tensors of a token's width alive at once inside a layer, measured on dense and on expert models
_COPIES = 3
_RESIDUALS = 4  # and of the hidden state and its norms


@dataclass(frozen=True)
class MemoryPlan:
    """Use of the memory that is left."""

    reads_ahead: bool  # whether the next layer is read while one computes
    hidden_bytes: int  # for what lies between two layers; more of it goes to disk
    ceiling: int  # resident bytes from which freed memory must be given back before a batch


def plan_memory(
    model: PreTrainedModel, stages: Stages, batches: Sequence[Batch], always: int, limit: int
) -> MemoryPlan:
    """Divide `limit` bytes of resident memory, of which `always` are taken by other things.

    Raises:
        InputError: there is not even room for one layer.
    """
    layers = [stage.tensors for stage in stages.layers]
    shapes = {batch.input_ids.shape for batch in batches}
    working = max(activation_bytes(model.config, model.dtype, layers, *shape) for shape in shapes)
    layer = max(stage.held_bytes for stage in stages.layers)
    converting = max(stage.converted_bytes for stage in stages.layers)
    embeddings = stages.embeddings.held_bytes
    always += stages.resident.nbytes

    def needed(layers: int) -> int:
        return always + max(embeddings, layers * layer + converting + working)

    if needed(1) > limit:
        enough = needed(1) * 21 // 20  # what is in use differs from run to run
        tokens = max(batch.input_ids.numel() for batch in batches)
        raise InputError(
            f"{show_size(limit)} of memory is too little: beside {show_size(always)} at any time, "
            f"one layer takes {show_size(layer + converting)} and a batch of {tokens} tokens "
            f"{show_size(working)}, the embeddings {show_size(embeddings)}; use --max-memory "
            f"{show_size(enough)} or more, or a smaller --batch-size"
        )
    reads_ahead = needed(2) <= limit
    return MemoryPlan(reads_ahead, limit - needed(1 + reads_ahead), limit - working // 4)


def statistics_bytes(attention: AttentionMap, recipe: Recipe) -> int:
    """Bytes of all histograms; other statistics are small beside them."""
    if not recipe_observer(recipe).needs_histogram:
        return 0
    modules = attention.cached.values()
    heads = sum(2 * m.num_kv_heads + m.num_heads * (recipe.targets == "qkv") for m in modules)
    return heads * NUM_BINS * torch.int64.itemsize


def activation_bytes(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    layers: Iterable[Mapping[str, Tensor]],
    rows: int,
    columns: int,
) -> int:
    """Estimate, on the safe side, the bytes of activations while the widest layer computes.

    Args:
        config: the model's.
        dtype: of the activations.
        layers: each layer's weights by name.
        rows: samples of the batch.
        columns: tokens of each.
    """
    text = config.get_text_config(decoder=True)
    experts = getattr(text, "num_experts_per_tok", None) or 1
    width = max(sum(_width(*weight, experts) for weight in layer.items()) for layer in layers)
    width = _COPIES * width + _RESIDUALS * int(text.hidden_size)
    activations = rows * columns * width * dtype.itemsize
    # a mask per row; eager attention has its scores as float32 and as probabilities, per head
    heads = int(text.num_attention_heads) if text._attn_implementation == "eager" else 1
    return int(activations + rows * columns**2 * heads * (4 + 2 * dtype.itemsize))


def _width(name: str, weight: Tensor, experts: int) -> int:
    """Values per token that computing with `weight` makes."""
    if name.endswith("A_log"):
        return weight.numel()  # the state of every token, where Mamba has no kernel
    if weight.dim() == 2:
        return weight.shape[0]
    # fused experts [E, ., .], of which a token sees a few
    return max(weight.shape[1:]) * experts if weight.dim() == 3 else 0
