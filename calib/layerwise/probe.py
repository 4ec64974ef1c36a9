"""A trial of a model on random weights, before any of its own is read.

So what stops a pass over all layers is found at once: attention that cannot be observed, and layers
that exchange more than what they return.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
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
from calib.layerwise.hidden import to_meta
from calib.layerwise.replay import DecoderParts, Output, Replay, find_embeddings
from calib.layerwise.weights import meta_tensors, replace_tensor
from fp8kv_runtime.errors import MISFITS

# one has rows of unequal length, so that the padding mask takes part
_PROBES = (
    Batch(torch.tensor([[3, 1, 4], [1, 5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]]), (0, 1), 0),
    Batch(torch.tensor([[9, 2, 6, 5]]), torch.tensor([[1, 1, 1, 1]]), (2,), 5),
)
_ROWS = 64  # of an embedding; token ids and positions of the probes are below that

# Q [B, H, T, D], K and V [B, K, T, D] of each attention module, call by call
Calls = dict[str, list[Tensor]]


@torch.inference_mode()
def probe_layers(model: PreTrainedModel, device: torch.device) -> DecoderParts:
    """Find the layers of `model`, and prove that it computes the same when they run one at a time, or refuse.

    The model is on the meta device, before and after; `device` is where to compute.
    """
    with random_weights(model.get_decoder(), device):
        probes = [to_device(probe, device) for probe in _PROBES]
        attention = map_attention(model)
        if attention.note:
            attention = _compare_whole(model, attention, probes, device)
        expected = _record(model, partial(_run_whole, model, attention, probes))
        # what is around the decoder may read an embedding's weights itself, as Gemma 4 with inputs per layer
        (decoder,) = (name for name, module in model.named_modules() if module is model.get_decoder())
        for reader, keeps_embeddings in product((attention.reader, decoder), (False, True)):
            parts = find_layers(model, replace(attention, reader=reader))
            parts = replace(parts, keeps_embeddings=keeps_embeddings)
            calls = _record(model, partial(_run_by_layer, model, parts, probes))
            if calls.keys() >= attention.cached.keys() and _are_equal(calls, expected):
                return parts
    raise UnsupportedModelError(
        f"{type(model).__name__}: its decoder layers exchange more than hidden states, so they "
        "cannot run one at a time; use --offload none"
    )


def _compare_whole(
    model: PreTrainedModel, attention: AttentionMap, probes: list[Batch], device: torch.device
) -> AttentionMap:
    """Prove that K and V of the decoder alone are the whole model's, whatever its other weights."""

    def constant(_: str, tensor: Tensor) -> Tensor:
        return torch.full((), 0.5, device=device).to(tensor.dtype).expand(tensor.shape)  # takes no memory

    names = {module: name for name, module in model.named_modules()}
    whole = replace(attention, reader=names[model.base_model])
    try:
        with _replace_meta(model, constant):
            expected = _record(model, partial(_run_whole, model, whole, probes))
    except NOT_FOR_TEXT:
        return attention  # as in memory, and the note says so
    if not _are_equal(_record(model, partial(_run_whole, model, attention, probes)), expected):
        raise UnsupportedModelError(
            f"{type(model).__name__} caches other K or V than its decoder alone, and cannot run "
            "without its other weights; use --offload none"
        )
    return replace(attention, note="")


def find_layers(model: PreTrainedModel, attention: AttentionMap) -> DecoderParts:
    """Find the list of layers that all attention modules are in; refuse a model without one."""
    for name, module in model.named_modules():
        prefix = f"{name}."
        cached = [n.removeprefix(prefix) for n in attention.cached if n.startswith(prefix)]
        if isinstance(module, nn.ModuleList) and len(cached) == len(attention.cached):
            count = 1 + max(int(n.partition(".")[0]) for n in cached)
            names = [f"{prefix}{i}" for i in range(count)]
            return DecoderParts(attention, list(module)[:count], names, list(module)[count:])
    raise UnsupportedModelError(
        f"{type(model).__name__}: its attention modules are not in one list of decoder layers, so "
        "they cannot run one at a time; use --offload none"
    )


def _record(model: PreTrainedModel, run: Callable[[], None]) -> Calls:
    calls: Calls = defaultdict(list)

    def record(name: str, *qkv: Tensor) -> None:
        calls[name] += [tensor.nan_to_num() for tensor in qkv]

    with observe_qkv(model, record):
        run()
    return calls


def _run_whole(model: PreTrainedModel, attention: AttentionMap, probes: list[Batch]) -> None:
    for probe in probes:
        attention.read(model, probe.input_ids, probe.attention_mask)


def _run_by_layer(model: PreTrainedModel, parts: DecoderParts, probes: list[Batch]) -> None:
    with Replay(model, parts) as replay:
        embedded = [replay.run_embeddings(probe) for probe in probes]
        outputs: list[Output | None] = [None] * len(probes)
        try:
            # every probe through one layer before the next: a layer that left something behind
            # for the next one would have left that of the last probe
            with _unloaded(find_embeddings(model.get_decoder(), parts.layers)):
                for index, (i, probe) in product(range(len(parts.layers)), enumerate(probes)):
                    embeddings = embedded[i] if parts.keeps_embeddings or index == 0 else to_meta(embedded[i])
                    outputs[i] = replay.run_layer(index, probe, outputs[i], embeddings)
        except MISFITS:
            # a layer misses what another would have left for it; the comparison will say so
            return


@contextmanager
def _unloaded(embeddings: list[nn.Embedding]) -> Iterator[None]:
    """Take the weights of `embeddings` away inside the block, as they are while layers run."""
    with ExitStack() as stack:
        for embedding in embeddings:
            stack.callback(setattr, embedding, "weight", embedding.weight)
            embedding.weight = nn.Parameter(embedding.weight.to("meta"), requires_grad=False)
        yield


def _are_equal(calls: Calls, expected: Calls) -> bool:
    pairs = [(tensors, expected[name]) for name, tensors in calls.items()]
    return all(len(one) == len(two) and all(map(torch.equal, one, two)) for one, two in pairs)


def random_bytes(decoder: nn.Module) -> int:
    """Return the bytes of memory that `random_weights` takes, but for a few rows of each embedding."""
    weights = meta_tensors(decoder).items()
    return sum({_kind(n, t): t.nbytes for n, t in weights if not _is_embedding(decoder, n)}.values())


def random_weights(decoder: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Give meta tensors random values inside the block; an embedding in its first rows only.

    Values are the same in every layer, to take little memory; every layer gets another input, so a
    forward pass still tells layers apart.
    """
    generator = torch.Generator().manual_seed(0)
    values: dict[tuple[str, torch.Size], Tensor] = {}

    def random(name: str, tensor: Tensor) -> Tensor:
        kind = _kind(name, tensor)
        if kind not in values:
            # memory that is not written takes no room, and an embedding can be half of a model
            new = torch.empty_like(tensor, device="cpu")
            part = new[:_ROWS] if _is_embedding(decoder, name) else new
            if not part.is_floating_point():
                new.zero_()
            elif part.dim() < 2:  # norms multiply, so they must not be near zero
                part.uniform_(0.5, 1.5, generator=generator)
            else:
                bound = sqrt(3 / part.shape[-1])
                part.uniform_(-bound, bound, generator=generator)
            values[kind] = new.to(device)
        return values[kind]

    return _replace_meta(decoder, random)


@contextmanager
def _replace_meta(module: nn.Module, make: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    meta = meta_tensors(module)
    try:
        for name, tensor in meta.items():
            values = make(name, tensor)
            if isinstance(tensor, nn.Parameter):
                values = nn.Parameter(values, requires_grad=False)
            replace_tensor(module, name, values)
        yield
    finally:
        for name, tensor in meta.items():
            replace_tensor(module, name, tensor)


def _kind(name: str, tensor: Tensor) -> tuple[str, torch.Size]:
    return re.sub(r"\d+", "N", name), tensor.shape  # the same in every layer


def _is_embedding(decoder: nn.Module, name: str) -> bool:
    return isinstance(decoder.get_submodule(name.rpartition(".")[0]), nn.Embedding)
