"""The measurement: every variant beside the reference, on the same tokens, in one run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from calib.choices import REFERENCE
from calib.eval.layer_errors import LayerError, LayerValues, layer_errors
from calib.eval.material import Material, continue_greedily, retrieve, same_tokens
from calib.eval.statistics import Divergence, chunks, compare, join
from calib.eval.variants import UNCHANGED, Setup, Variant

# tokens at a time: the logits of a long document would not fit into memory
_CHUNK = 512


@dataclass
class Measured:
    """What was measured of one variant."""

    variant: Variant
    documents: list[Divergence] = field(default_factory=list)
    long_documents: list[Divergence] = field(default_factory=list)
    same_tokens: list[int] = field(default_factory=list)
    found_passkeys: list[bool] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    layers: dict[int, LayerError] = field(default_factory=dict)
    values: dict[int, LayerValues] = field(default_factory=dict)  # of the reference


@torch.inference_mode()
def measure(setup: Setup, variants: Sequence[Variant], material: Material) -> dict[str, Measured]:
    """Measure all variants; the reference is the first entry."""
    found = {variant.name: Measured(variant) for variant in (UNCHANGED, *variants)}
    for number, token_ids in enumerate(material.documents):
        setup.progress(f"document {number + 1} of {len(material.documents)}")
        for name, divergence in read(setup, token_ids, variants).items():
            found[name].documents.append(divergence)
    served = [variant for variant in variants if variant.served]
    for token_ids in material.long_documents:
        setup.progress(f"{len(token_ids):,} tokens at once")
        for name, divergence in read(setup, token_ids, served).items():
            found[name].long_documents.append(divergence)
    setup.progress("per-layer errors")
    errors, found[REFERENCE].values = layer_errors(setup.model, material.layer_documents, variants)
    for name, layers in errors.items():
        found[name].layers = layers
    for measured in found.values():
        if measured.variant is UNCHANGED or measured.variant.generates:
            _continue(setup, measured, found[REFERENCE], material)
    return found


def _continue(setup: Setup, measured: Measured, reference: Measured, material: Material) -> None:
    """Write greedy text and look for passkeys."""
    setup.progress(f"text: {measured.variant.name}")
    with measured.variant.applied(setup):
        if material.prompts:
            measured.texts = continue_greedily(setup, material.prompts, material.new_tokens)
        measured.found_passkeys = retrieve(setup, material.passkeys)
    pairs = zip(reference.texts, measured.texts, strict=True)
    measured.same_tokens = [same_tokens(a, b) for a, b in pairs]


def read(setup: Setup, token_ids: Tensor, variants: Sequence[Variant]) -> dict[str, Divergence]:
    """Compare each variant's logits on `token_ids` [T] with the reference's, itself among them."""
    model = setup.model
    names = [REFERENCE, *(variant.name for variant in variants)]
    caches = {name: DynamicCache(config=model.config) for name in names}
    parts: dict[str, list[Divergence]] = {name: [] for name in caches}
    for rows in chunks(len(token_ids), _CHUNK):
        chunk, following = token_ids[rows], token_ids[rows.start + 1 : rows.stop + 1]
        reference = _logits(model, chunk, caches[REFERENCE])
        parts[REFERENCE].append(compare(reference, reference, following))
        for variant in variants:
            with variant.applied(setup):
                logits = _logits(model, chunk, caches[variant.name])
            parts[variant.name].append(compare(reference, logits, following))
    return {name: join(each) for name, each in parts.items()}


def _logits(model: PreTrainedModel, token_ids: Tensor, cache: Cache) -> Tensor:
    ids = token_ids[None].to(model.device)
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits[0]
