"""The measurement: every variant beside the reference, on the same tokens, in one run."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from calib.eval.layer_errors import LayerError, LayerValues, layer_errors
from calib.eval.material import Material, continue_greedily, retrieve, same_tokens
from calib.eval.statistics import Divergence, chunks, compare, join
from calib.eval.variants import REFERENCE, Variant
from fp8kv_runtime.hf import Backend

# tokens at a time: the logits of a long document would not fit into memory
_CHUNK = 512


@dataclass
class Measured:
    """What was measured of one variant."""

    variant: Variant | None  # None: the reference itself
    documents: list[Divergence] = field(default_factory=list)
    long_documents: list[Divergence] = field(default_factory=list)
    same_tokens: list[int] = field(default_factory=list)
    found_passkeys: list[bool] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    layers: dict[int, LayerError] = field(default_factory=dict)
    values: dict[int, LayerValues] = field(default_factory=dict)  # of the reference


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    variants: Sequence[Variant],
    material: Material,
    backend: Backend,
    progress: Callable[[str], None] = lambda stage: None,
) -> dict[str, Measured]:
    """Measure all variants; the reference is the first entry."""
    found = {REFERENCE: Measured(None), **{v.name: Measured(v) for v in variants}}
    for number, token_ids in enumerate(material.documents):
        progress(f"document {number + 1} of {len(material.documents)}")
        for name, divergence in read(model, token_ids, variants, backend).items():
            found[name].documents.append(divergence)
    for token_ids in material.long_documents:
        progress(f"{len(token_ids):,} tokens at once")
        served = [variant for variant in variants if variant.served]
        for name, divergence in read(model, token_ids, served, backend).items():
            found[name].long_documents.append(divergence)
    progress("per-layer errors")
    errors, found[REFERENCE].values = layer_errors(
        model, material.documents[: material.layer_documents], variants
    )
    for name, layers in errors.items():
        found[name].layers = layers
    _continue(model, tokenizer, found, material, backend, progress)
    return found


def _continue(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    found: dict[str, Measured],
    material: Material,
    backend: Backend,
    progress: Callable[[str], None],
) -> None:
    """Greedy text and passkeys, for what can generate: the reference and whole FP8 caches."""
    reference = found[REFERENCE]
    for name, measured in found.items():
        variant = measured.variant
        if variant is not None and not variant.generates:
            continue
        progress(f"text: {name}")
        with variant.applied(model, backend) if variant else nullcontext():
            if material.prompts:
                measured.texts = continue_greedily(model, material.prompts, material.new_tokens)
            measured.found_passkeys = retrieve(model, tokenizer, material.passkeys)
        pairs = zip(reference.texts, measured.texts, strict=True)
        measured.same_tokens = [same_tokens(a, b) for a, b in pairs]


def read(
    model: PreTrainedModel, token_ids: Tensor, variants: Sequence[Variant], backend: Backend
) -> dict[str, Divergence]:
    """What each variant's logits are worth on `token_ids` [T], and the reference's own."""
    names = [REFERENCE, *(variant.name for variant in variants)]
    caches = {name: DynamicCache(config=model.config) for name in names}
    parts: dict[str, list[Divergence]] = {name: [] for name in caches}
    for rows in chunks(len(token_ids), _CHUNK):
        chunk, following = token_ids[rows], token_ids[rows.start + 1 : rows.stop + 1]
        reference = _logits(model, chunk, caches[REFERENCE])
        parts[REFERENCE].append(compare(reference, reference, following))
        for variant in variants:
            with variant.applied(model, backend):
                logits = _logits(model, chunk, caches[variant.name])
            parts[variant.name].append(compare(reference, logits, following))
    return {name: join(each) for name, each in parts.items()}


def _logits(model: PreTrainedModel, token_ids: Tensor, cache: Cache) -> Tensor:
    ids = token_ids[None].to(model.device)
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits[0]
