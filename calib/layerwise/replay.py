"""Run a model's own forward as far as one of its layers, with stored results before that layer.

A forward pass up to layer `i` computes masks, position embeddings and the arguments of each layer
as it always does. The layers before `i` return what layer `i - 1` had returned, so whatever the
model does between two layers is done; embeddings return what they had returned.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.capture.attention import AttentionMap
from calib.data import Batch
from calib.errors import UnsupportedModelError

# [B, T, W] of a decoder layer, alone or first in a tuple; or [..., W] of each call of embeddings, in order
Output = Tensor | tuple[Tensor | None, ...]


def find_embeddings(decoder: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Embedding]:
    """Return the embeddings of `decoder` that are outside its layers."""
    inside = {module for layer in layers for module in layer.modules()}
    return [m for m in decoder.modules() if isinstance(m, nn.Embedding) and m not in inside]


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a model that is run layer by layer."""

    attention: AttentionMap
    layers: list[nn.Module]  # of the decoder, up to the last that caches K and V
    names: list[str]  # of these layers
    unused: list[nn.Module]  # the other layers
    keeps_embeddings: bool = False  # whether more than the first layer depends on the embeddings


class _LayerDone(Exception):
    """The end of a forward pass; holds the output of the layer that was asked for."""


@contextmanager
def _replaced_forward(module: nn.Module, replacement: Callable[..., Any]) -> Iterator[None]:
    """Let `replacement(forward, ...)` run for `forward`, the module's own too, as accelerate's is."""
    own = vars(module).get("forward")
    module.forward = partial(replacement, module.forward)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


class Replay:
    """A model whose decoder layers run one at a time inside the block."""

    def __init__(self, model: PreTrainedModel, parts: DecoderParts) -> None:
        self._model, self._attention, self._layers = model, parts.attention, parts.layers
        self._embeddings = find_embeddings(model.get_decoder(), parts.layers)
        self._index: int | None = None
        self._previous: Output | None = None
        self._embedded: list[Tensor] = []

    def __enter__(self) -> "Replay":
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                stack.enter_context(_replaced_forward(layer, partial(self._layer, index)))
            for embedding in self._embeddings:
                stack.enter_context(_replaced_forward(embedding, self._embedding))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run_embeddings(self, batch: Batch) -> Output:
        """Run the model up to its first layer and return what its embeddings returned."""
        return self._run(batch, None, None, [])

    def run_layer(self, index: int, batch: Batch, previous: Output | None, embedded: Output) -> Output:
        """Run layer `index` on the output `previous` of the layer before it; return its output.

        The index after the last stands for the rest of the model, whose output is its last hidden state.
        `embedded` is what `run_embeddings` returned; zeros stand in for meta tensors, for a layer
        that depends on the layer before it alone.
        """
        device = batch.input_ids.device
        parts = [part for part in embedded if part is not None]
        parts = [torch.zeros_like(p, device=device) if p.is_meta else p for p in parts]
        return self._run(batch, index, previous, parts)

    def _run(
        self, batch: Batch, index: int | None, previous: Output | None, embedded: list[Tensor]
    ) -> Output:
        self._index, self._previous, self._embedded = index, previous, embedded
        try:
            model_output = self._attention.read(self._model, batch.input_ids, batch.attention_mask)
        except _LayerDone as layer_done:
            # its frames hold activations, and cycles would keep those through the next batch
            traceback.clear_frames(layer_done.__traceback__)
            output: Output = layer_done.args[0]
            return output
        finally:
            self._index, self._previous, self._embedded = None, None, []
        if index == len(self._layers):
            output = model_output.last_hidden_state
            return output
        raise UnsupportedModelError(
            f"{type(self._model).__name__} skips decoder layer {index or 0}; use --offload none"
        )

    def _layer(self, index: int, forward: Callable[..., Output], *args: Any, **kwargs: Any) -> Output:
        if self._index is None:
            raise _LayerDone(tuple(self._embedded))
        if index < self._index:
            assert self._previous is not None
            return self._previous
        raise _LayerDone(forward(*args, **kwargs))

    def _embedding(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if self._index is None:
            self._embedded.append(forward(*args, **kwargs))
            return self._embedded[-1]
        return self._embedded.pop(0)
