"""Try a model on random weights, before any of its own is read.

So what stops a pass over all layers is found at once: attention that cannot be observed, and layers
that exchange more than what they return.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import sqrt

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.capture.attention import NOT_FOR_TEXT, AttentionMap, map_attention, observe_qkv
from calib.capture.loop import to_device
from calib.data import Batch
from calib.errors import UnsupportedModelError
from calib.layerwise.hidden import form_of
from calib.layerwise.replay import Output, replaying
from calib.layerwise.stages import named_tensors
from calib.layerwise.weights import replace_tensor

# one has rows of unequal length, so that the padding mask takes part
_PROBES = (
    Batch(torch.tensor([[3, 1, 4], [1, 5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]]), (0, 1), 0),
    Batch(torch.tensor([[9, 2, 6, 5]]), torch.tensor([[1, 1, 1, 1]]), (2,), 5),
)

# token ids and positions of the probes are below that, so an embedding needs no more rows
_ROWS = 64
_SEED = 0

# Q, K and V of each attention module, call by call
Seen = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Layout:
    """The parts of a model that is run layer by layer."""

    attention: AttentionMap
    layers: list[nn.Module]  # of the decoder, up to the last that caches K and V
    names: list[str]  # of these layers
    unused: list[nn.Module]  # the other layers
    keeps_embeddings: bool  # whether more than the first layer depends on the embeddings


@torch.inference_mode()
def probe_layers(model: PreTrainedModel, device: torch.device) -> Layout:
    """Find the layers of `model`, and prove that it computes the same when they run one at a time.

    The model is on the meta device, before and after; `device` is where to compute.
    """
    probes = [to_device(probe, device) for probe in _PROBES]
    with random_weights(model.get_decoder(), device):
        attention = map_attention(model)
        if attention.note:
            attention = _compare_whole(model, attention, probes, device)
        layers, names, unused = _decoder_layers(model, attention)
        expected = _seen(model, partial(_run_whole, model, attention, probes))
        for keeps in (False, True):
            run = partial(_run_by_layer, model, attention, probes, layers, keeps)
            found = _seen(model, run)
            if found.keys() >= attention.cached.keys() and _agree(found, expected):
                return Layout(attention, layers, names, unused, keeps)
    raise UnsupportedModelError(
        f"{type(model).__name__}: its decoder layers exchange more than hidden states, so they "
        "cannot run one at a time; use --offload none"
    )


def _compare_whole(
    model: PreTrainedModel, attention: AttentionMap, probes: list[Batch], device: torch.device
) -> AttentionMap:
    """Prove that K and V of the decoder alone are the whole model's, whatever its other weights."""
    names = {module: name for name, module in model.named_modules()}
    whole = replace(attention, reader=names[model.base_model])
    try:
        with _constant_weights(model, device):
            expected = _seen(model, partial(_run_whole, model, whole, probes))
    except NOT_FOR_TEXT:
        return attention  # as in memory, and the note says so
    if not _agree(_seen(model, partial(_run_whole, model, attention, probes)), expected):
        raise UnsupportedModelError(
            f"{type(model).__name__} caches other K or V than its decoder alone, and cannot run "
            "without its other weights; use --offload none"
        )
    return replace(attention, note="")


def _decoder_layers(
    model: PreTrainedModel, attention: AttentionMap
) -> tuple[list[nn.Module], list[str], list[nn.Module]]:
    for name, module in model.named_modules():
        prefix = f"{name}."
        cached = [n.removeprefix(prefix) for n in attention.cached if n.startswith(prefix)]
        if isinstance(module, nn.ModuleList) and len(cached) == len(attention.cached):
            indices = [int(n.partition(".")[0]) for n in cached]
            layers, count = list(module), max(indices) + 1
            return layers[:count], [f"{prefix}{i}" for i in range(count)], layers[count:]
    raise UnsupportedModelError(
        f"{type(model).__name__}: its attention modules are not in one list of decoder layers, so "
        "they cannot run one at a time; use --offload none"
    )


def _seen(model: PreTrainedModel, run: Callable[[], None]) -> Seen:
    seen: Seen = defaultdict(list)

    def sink(name: str, *qkv: Tensor) -> None:
        seen[name] += [tensor.nan_to_num() for tensor in qkv]

    with observe_qkv(model, sink):
        run()
    return seen


def _run_whole(model: PreTrainedModel, attention: AttentionMap, probes: list[Batch]) -> None:
    for probe in probes:
        attention.read(model, probe.input_ids, probe.attention_mask)


def _run_by_layer(
    model: PreTrainedModel,
    attention: AttentionMap,
    probes: list[Batch],
    layers: list[nn.Module],
    keeps: bool,
) -> None:
    with replaying(model, attention, layers) as replay:
        embedded = [replay.run_embeddings(probe) for probe in probes]
        outputs: list[Output | None] = [None] * len(probes)
        try:
            # every probe through one layer before the next: a layer that left something behind
            # for the next one would have left that of the last probe
            for index, (i, probe) in product(range(len(layers)), enumerate(probes)):
                known = embedded[i] if keeps or index == 0 else form_of(embedded[i])
                outputs[i] = replay.run_layer(index, probe, outputs[i], known)
        except (LookupError, TypeError, AttributeError, RuntimeError, ValueError):
            # a layer misses what another would have left for it; the comparison will say so
            return


def _agree(found: Seen, expected: Seen) -> bool:
    return all(
        len(tensors) == len(expected[name]) and all(map(torch.equal, tensors, expected[name]))
        for name, tensors in found.items()
    )


def random_bytes(decoder: nn.Module) -> int:
    """Bytes of memory that `random_weights` takes, but for a few rows of each embedding."""
    kinds = {_kind(n, t): t.nbytes for n, t in _meta(decoder).items() if not _rows(decoder, n)}
    return sum(kinds.values())


@contextmanager
def random_weights(decoder: nn.Module, device: torch.device) -> Iterator[None]:
    """Give meta tensors random values inside the block; an embedding in its first rows only.

    Values are the same in every layer, to take little memory; every layer gets another input, so a
    forward pass still tells layers apart.
    """
    generator = torch.Generator().manual_seed(_SEED)
    made: dict[tuple[str, torch.Size], Tensor] = {}

    def random(name: str, tensor: Tensor) -> Tensor:
        kind = _kind(name, tensor)
        if kind not in made:
            made[kind] = _random(tensor, generator, _rows(decoder, name)).to(device)
        return made[kind]

    with _replaced(decoder, random):
        yield


def _constant_weights(model: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Give meta tensors one value in all elements inside the block, which takes no memory."""

    def constant(_: str, tensor: Tensor) -> Tensor:
        return torch.full((), 0.5, device=device).to(tensor.dtype).expand(tensor.shape)

    return _replaced(model, constant)


@contextmanager
def _replaced(module: nn.Module, make: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    meta = _meta(module)
    try:
        for name, tensor in meta.items():
            values = make(name, tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            values = nn.Parameter(values, requires_grad=False) if is_parameter else values
            replace_tensor(module, name, values)
        yield
    finally:
        for name, tensor in meta.items():
            replace_tensor(module, name, tensor)


def _meta(decoder: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named_tensors(decoder) if tensor.is_meta}


def _kind(name: str, tensor: Tensor) -> tuple[str, torch.Size]:
    # layer 3's and layer 4's are one
    return re.sub(r"\d+", "N", name), tensor.shape


def _rows(decoder: nn.Module, name: str) -> int | None:
    module = decoder.get_submodule(name.rpartition(".")[0])
    return _ROWS if isinstance(module, nn.Embedding) else None


def _random(like: Tensor, generator: torch.Generator, rows: int | None) -> Tensor:
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
    return made
