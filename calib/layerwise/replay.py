"""Run a model's own forward as far as one of its layers, with stored results before that layer.

A forward pass up to layer `i` computes masks, position embeddings and the arguments of each layer
as it always does. The layers before `i` return what layer `i - 1` had returned, so whatever the
model does between two layers is done; embeddings return what they had returned.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.capture.attention import AttentionMap
from calib.data import Batch
from calib.errors import UnsupportedModelError

# what a decoder layer returns, or what the embeddings returned in the order of their calls
Output = Tensor | tuple[Tensor | None, ...]

_EMBEDDINGS_ONLY = -1


def embeddings_of(decoder: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Embedding]:
    """The embeddings of `decoder` that are outside its layers."""
    inside = {module for layer in layers for module in layer.modules()}
    return [m for m in decoder.modules() if isinstance(m, nn.Embedding) and m not in inside]


@contextmanager
def replaying(
    model: PreTrainedModel, attention: AttentionMap, layers: Sequence[nn.Module]
) -> Iterator["Replay"]:
    """Take over `layers` of the decoder, and its embeddings outside them, inside the block."""
    replay = Replay(model, attention)
    embeddings = embeddings_of(model.get_decoder(), layers)
    for index, layer in enumerate(layers):
        layer.forward = partial(replay.layer, index, layer.forward)
    for embedding in embeddings:
        stand_in = partial(replay.embedding, embedding.forward)
        embedding.forward = stand_in  # type: ignore[method-assign]
    try:
        yield replay
    finally:
        for module in (*layers, *embeddings):
            del module.forward


@dataclass
class _Step:
    """One forward pass, as far as layer `index`."""

    index: int
    previous: Output | None = None
    embedded: list[Tensor] = field(default_factory=list)


class Replay:
    """A model whose decoder's layers run one at a time; see `replaying`."""

    def __init__(self, model: PreTrainedModel, attention: AttentionMap) -> None:
        self._model = model
        self._attention = attention
        self._step = _Step(_EMBEDDINGS_ONLY)

    def run_embeddings(self, batch: Batch) -> Output:
        """Run the model up to its first layer and return what its embeddings returned."""
        step = _Step(_EMBEDDINGS_ONLY)
        self._run(batch, step)
        return tuple(step.embedded)

    def run_layer(self, index: int, batch: Batch, previous: Output | None, embedded: Output) -> Output:
        """Run layer `index` on the output `previous` of the layer before it; return its output.

        `embedded` is what `run_embeddings` returned; zeros stand in for meta tensors, for a layer
        that depends on the layer before it alone.
        """
        device = batch.input_ids.device
        known = [part for part in embedded if part is not None]
        known = [torch.zeros_like(p, device=device) if p.is_meta else p for p in known]
        return self._run(batch, _Step(index, previous, known))

    def _run(self, batch: Batch, step: _Step) -> Output:
        self._step = step
        try:
            self._attention.read(self._model, batch.input_ids, batch.attention_mask)
        except _LayerDone as done:
            # its frames hold activations, and cycles would keep those through the next batch
            traceback.clear_frames(done.__traceback__)
            output: Output = done.args[0]
            return output
        finally:
            self._step = _Step(_EMBEDDINGS_ONLY)
        raise UnsupportedModelError(
            f"{type(self._model).__name__} skips decoder layer {max(step.index, 0)}; use --offload none"
        )

    def layer(self, index: int, forward: Callable[..., Output], *args: Any, **kwargs: Any) -> Output:
        """Stand in for the `forward` of layer `index`."""
        step = self._step
        if index < step.index:
            assert step.previous is not None
            return step.previous
        raise _LayerDone(() if step.index == _EMBEDDINGS_ONLY else forward(*args, **kwargs))

    def embedding(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Stand in for the `forward` of an embedding."""
        step = self._step
        if step.index == _EMBEDDINGS_ONLY:
            step.embedded.append(forward(*args, **kwargs))
            return step.embedded[-1]
        return step.embedded.pop(0)


class _LayerDone(Exception):
    """The layer that was asked for has run; holds its output."""
