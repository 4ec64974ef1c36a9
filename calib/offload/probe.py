"""Try a model without its weights: random ones, the same in every layer, take little memory.

So what stops a pass over all layers is found before any weight is read: attention that cannot be
observed, and layers that exchange more than what they return.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.attention import AttentionMap, map_attention, observe_qkv
from calib.data import Batch
from calib.errors import UnsupportedModelError
from calib.measure import to_device
from calib.offload.hidden import form_of
from calib.offload.replay import Output, replaying
from calib.offload.stages import named_tensors, replace_tensor

_SEED = 0
_ROWS = 64  # of an embedding; the probes use no higher token ids or positions
# two rows of unequal length, so that the padding mask takes part
_PROBE = Batch(
    torch.tensor([[3, 1, 4, 5], [5, 9, 2, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]), (0, 1)
)

Seen = dict[str, tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Layout:
    """How a model is run layer by layer."""

    attention: AttentionMap
    layers: list[nn.Module]  # of the decoder, up to the last that caches K and V
    names: list[str]  # of these layers
    unused: list[nn.Module]  # the other layers
    keeps_embeddings: bool  # whether more than the first layer depends on the embeddings


@torch.inference_mode()
def probe_layers(model: PreTrainedModel, device: torch.device) -> Layout:
    """Find the layers of `model`, and prove that it computes the same when they run one at a time.

    Args:
        model: on the meta device, where it is again afterwards.
        device: where to compute.

    Raises:
        UnsupportedModelError: its attention cannot be observed, or its layers exchange more than
            what they return, such as K and V.
    """
    probe = to_device(_PROBE, device)
    with _random_weights(model.get_decoder(), device):
        attention = map_attention(model)
        layers, names, unused = _decoder_layers(model, attention)
        expected = _seen(model, partial(_run_whole, model, probe))
        for keeps in (False, True):
            found = _seen(model, partial(_run_by_layer, model, probe, layers, keeps))
            if found.keys() >= attention.cached.keys() and _agree(found, expected):
                return Layout(attention, layers, names, unused, keeps)
    raise UnsupportedModelError(
        f"{type(model).__name__}: its decoder layers exchange more than hidden states, so they "
        "cannot run one at a time; use --offload none"
    )


def _decoder_layers(
    model: PreTrainedModel, attention: AttentionMap
) -> tuple[list[nn.Module], list[str], list[nn.Module]]:
    for name, module in model.named_modules():
        prefix = f"{name}."
        if isinstance(module, nn.ModuleList) and all(
            n.startswith(prefix) for n in attention.cached
        ):
            indices = [int(n.removeprefix(prefix).partition(".")[0]) for n in attention.cached]
            layers, count = list(module), max(indices) + 1
            return layers[:count], [f"{prefix}{i}" for i in range(count)], layers[count:]
    raise UnsupportedModelError(
        f"{type(model).__name__}: its attention modules are not in one list of decoder layers, so "
        "they cannot run one at a time; use --offload none"
    )


def _seen(model: PreTrainedModel, run: Callable[[], None]) -> Seen:
    seen: Seen = {}
    with observe_qkv(model, lambda name, *qkv: seen.__setitem__(name, _copies(*qkv))):
        run()
    return seen


def _copies(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query.clone(), key.clone(), value.clone()


def _run_whole(model: PreTrainedModel, probe: Batch) -> None:
    model.get_decoder()(
        input_ids=probe.input_ids, attention_mask=probe.attention_mask, use_cache=False
    )


def _run_by_layer(
    model: PreTrainedModel, probe: Batch, layers: list[nn.Module], keeps: bool
) -> None:
    with replaying(model.get_decoder(), layers) as replay:
        embedded = replay.run_embeddings(probe)
        form = form_of(embedded)
        output: Output | None = None
        try:
            for index in range(len(layers)):
                needed = embedded if keeps or index == 0 else form
                output = replay.run_layer(index, probe, output, needed)
        except (LookupError, TypeError, AttributeError, RuntimeError, ValueError):
            # a layer misses what another would have left for it; the comparison will say so
            return


def _agree(found: Seen, expected: Seen) -> bool:
    pairs = ((x, y) for name in found for x, y in zip(found[name], expected[name], strict=True))
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


@contextmanager
def _random_weights(decoder: nn.Module, device: torch.device) -> Iterator[None]:
    meta = {name: tensor for name, tensor in named_tensors(decoder) if tensor.is_meta}
    generator = torch.Generator().manual_seed(_SEED)
    made: dict[tuple[str, torch.Size], Tensor] = {}
    for name, tensor in meta.items():
        # layer 3's and layer 4's are one
        kind = re.sub(r"\d+", "N", name), tensor.shape
        if kind not in made:
            is_embedding = isinstance(decoder.get_submodule(name.rpartition(".")[0]), nn.Embedding)
            made[kind] = _random(tensor, generator, rows=_ROWS if is_embedding else None).to(device)
        replace_tensor(decoder, name, made[kind])
    try:
        yield
    finally:
        for name, tensor in meta.items():
            replace_tensor(decoder, name, tensor)


def _random(like: Tensor, generator: torch.Generator, *, rows: int | None) -> Tensor:
    made = torch.empty_like(like, device="cpu")
    if not made.is_floating_point():
        return made.zero_()
    # memory that is not written takes no room, and an embedding can be half of a model
    part = made[:rows] if rows else made
    if part.dim() < 2:  # norms multiply, so they must not be near zero
        part.uniform_(0.5, 1.5, generator=generator)
    else:
        bound = sqrt(3 / part.shape[-1])
        part.uniform_(-bound, bound, generator=generator)
    return nn.Parameter(made, requires_grad=False) if isinstance(like, nn.Parameter) else made
