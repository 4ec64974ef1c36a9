"""The measurement: every variant beside the reference, on the same tokens; and `--search KL`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from calib.choices import REFERENCE
from calib.evaluate.inputs import Material, continue_greedily, cut_text, retrieve, same_tokens
from calib.evaluate.layer_errors import LayerError, LayerValues, layer_errors
from calib.evaluate.report import Search, Texts
from calib.evaluate.statistics import Divergence, chunks, compare, join
from calib.evaluate.variants import UNCHANGED, Setup, Variant

# tokens at a time: the logits of a long document would not fit into memory
_CHUNK = 512
_AT_ONCE = 8  # variants of a search, each with a cache of its own


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

    @property
    def is_finite(self) -> bool:
        """Whether every token has a finite KL."""
        return all(bool(each.kl.isfinite().all()) for each in self.documents)


@torch.inference_mode()
def measure(setup: Setup, variants: Sequence[Variant], material: Material) -> dict[str, Measured]:
    """Measure all variants; the reference is the first entry."""
    found = {variant.name: Measured(variant) for variant in (UNCHANGED, *variants)}
    for token_ids in setup.progress.each("documents", material.documents, "documents"):
        for name, divergence in read(setup, token_ids, variants).items():
            found[name].documents.append(divergence)
    served = [variant for variant in variants if variant.served]
    for token_ids in setup.progress.each("long documents", material.long_documents, "documents"):
        for name, divergence in read(setup, token_ids, served).items():
            found[name].long_documents.append(divergence)
    errors, found[REFERENCE].values = layer_errors(setup, material.layer_documents, variants)
    for name, layers in errors.items():
        found[name].layers = layers
    writing = [m for m in found.values() if m.variant is UNCHANGED or m.variant.generates]
    for measured in setup.progress.each("text", writing, "variants"):
        _continue(setup, measured, found[REFERENCE], material)
    return found


def _continue(setup: Setup, measured: Measured, reference: Measured, material: Material) -> None:
    """Write greedy text and look for passkeys."""
    setup.progress.detail(measured.variant.name)
    with measured.variant.applied(setup):
        if material.prompts:
            measured.texts = continue_greedily(setup, material.prompts, material.new_tokens)
        measured.found_passkeys = retrieve(setup, material.passkeys)
    pairs = zip(reference.texts, measured.texts, strict=True)
    measured.same_tokens = [same_tokens(a, b) for a, b in pairs]


def written_texts(setup: Setup, material: Material, measured: dict[str, Measured]) -> Texts:
    """The greedy texts of `measured`, cut where they leave the reference's."""
    tokenizer = setup.tokenizer
    continuations = {
        name: [cut_text(tokenizer, *pair) for pair in zip(m.texts, m.same_tokens, strict=True)]
        for name, m in measured.items()
        if m.texts
    }
    prompts = [tokenizer.decode(prompt) for prompt in material.prompts]
    return Texts(prompts=prompts, continuations=continuations)


def read(setup: Setup, token_ids: Tensor, variants: Sequence[Variant]) -> dict[str, Divergence]:
    """Compare each variant's logits on `token_ids` [T] with the reference's, itself among them."""
    model = setup.model
    caches = {v.name: DynamicCache(config=model.config) for v in (UNCHANGED, *variants)}
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


@torch.inference_mode()
def search(setup: Setup, variant: Variant, documents: Sequence[Tensor], budget: float) -> Search:
    """Leave the layers that diverge most alone in 16 bits, as few as the budget allows.

    Layers are ranked by the KL of each alone in FP8; that of several is measured, not added up.
    """
    layers = list(variant.layers)
    ranking = [_only(variant, {layer}) for layer in layers]

    def kl(skipped: Iterable[int]) -> float:
        kept = set(layers) - set(skipped)
        stage = f"search: {len(kept)} of {len(layers)} layers in FP8"
        return mean_kl(setup, stage, [_only(variant, kept)], documents)[0] if kept else 0.0

    stage = "search: each layer alone"
    alone = dict(zip(layers, mean_kl(setup, stage, ranking, documents), strict=True))
    worst_first = sorted(layers, key=lambda layer: (math.isfinite(alone[layer]), -alone[layer]))
    measured = {0: kl([]), len(layers): 0.0}
    few, enough = (0, 0) if measured[0] <= budget else (0, len(layers))
    while enough - few > 1:
        half = (few + enough) // 2
        measured[half] = kl(worst_first[:half])
        few, enough = (few, half) if measured[half] <= budget else (half, enough)
    return Search(
        variant=variant.name,
        budget=budget,
        documents=len(documents),
        kl_of_all=measured[0],
        kl_alone=alone,
        skipped=tuple(sorted(worst_first[:enough])),
        kl=measured[enough],
    )


def _only(variant: Variant, kept: set[int]) -> Variant:
    assert variant.scales is not None
    layers = {n: s for n, s in variant.scales.layers.items() if s.layer_idx in kept}
    name = f"layers {sorted(kept)}"
    return replace(variant, name=name, scales=replace(variant.scales, layers=layers))


def mean_kl(
    setup: Setup, stage: str, variants: Sequence[Variant], documents: Sequence[Tensor]
) -> list[float]:
    """Mean KL of each variant over all tokens of `documents`; progress shows it as `stage`."""
    total = {variant.name: 0.0 for variant in variants}
    reads = [*product(documents, chunks(len(variants), _AT_ONCE))]
    for token_ids, few in setup.progress.each(stage, reads, "reads"):
        found = read(setup, token_ids, variants[few])
        for variant in variants[few]:
            total[variant.name] += float(found[variant.name].kl.double().sum())
    tokens = sum(map(len, documents))
    return [total[variant.name] / tokens for variant in variants]
