"""The measurement: every variant beside the reference, on the same tokens; and `--search KL`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import Cache, PreTrainedTokenizerBase

from calib.capture.loop import media_arguments
from calib.choices import REFERENCE
from calib.data import MediaSample
from calib.divergence import ReferenceLogits
from calib.errors import InputError
from calib.evaluate.inputs import EvaluationText, Passkey
from calib.evaluate.layer_errors import LayerError, LayerValues, read_layers
from calib.evaluate.report import Continuation, Search, Texts
from calib.evaluate.retrieval import LongDocument
from calib.evaluate.statistics import Divergence, chunks, compare, join
from calib.evaluate.variants import UNCHANGED, Setup, Variant
from calib.models.load import forget_positions
from fp8kv_runtime.hf import cache_argument, new_cache

_TOKENS, _LOGITS = 512, 2**26  # at a time, at most
_AT_ONCE = 8  # variants of a search, each with a cache of its own


@dataclass
class VariantResults:
    """The measurements of one variant."""

    variant: Variant
    documents: list[Divergence] = field(default_factory=list)
    long_documents: list[Divergence] = field(default_factory=list)
    same_tokens: list[int] = field(default_factory=list)  # of each text, before it leaves the reference's
    passkeys: list[bool] = field(default_factory=list)  # whether each was retrieved
    texts: list[list[int]] = field(default_factory=list)
    layers: dict[int, LayerError] = field(default_factory=dict)
    values: dict[int, LayerValues] = field(default_factory=dict)  # of the reference

    @property
    def is_finite(self) -> bool:
        """Return whether every token has a finite KL."""
        return all(bool(each.kl.isfinite().all()) for each in self.documents)


@torch.inference_mode()
def measure(setup: Setup, variants: Sequence[Variant], text: EvaluationText) -> dict[str, VariantResults]:
    """Measure all variants; the reference is the first entry."""
    measured = {variant.name: VariantResults(variant) for variant in (UNCHANGED, *variants)}
    for token_ids in setup.progress.each("held-out text", text.documents, "samples"):
        compared = setup.saved.once(compare_variants, setup, token_ids, variants)
        for name, divergence in compared.items():
            measured[name].documents.append(divergence)
    served = [variant for variant in variants if variant.is_loadable or variant.cache]
    for document in setup.progress.each("long documents", text.long_documents, "documents"):
        compared = setup.saved.once(compare_variants, setup, document.token_ids, served, long=document)
        for name, divergence in compared.items():
            measured[name].long_documents.append(divergence)
    documents = [(token_ids, None) for token_ids in text.layer_documents]
    errors, measured[REFERENCE].values = setup.saved.once(read_layers, setup, documents, variants)
    for name, layers in errors.items():
        measured[name].layers = layers
    writing = [m for m in measured.values() if m.variant is UNCHANGED or m.variant.is_whole_cache]
    for writer in setup.progress.each("text", writing, "variants"):
        setup.progress.detail(writer.variant.name)
        writer.texts, writer.passkeys = setup.saved.once(_write, setup, writer.variant, text)
        pairs = zip(measured[REFERENCE].texts, writer.texts, strict=True)
        writer.same_tokens = [_count_same(a, b) for a, b in pairs]
    return measured


def compare_variants(
    setup: Setup,
    token_ids: Tensor,
    variants: Sequence[Variant],
    media: MediaSample | None = None,
    long: LongDocument | None = None,
) -> dict[str, Divergence]:
    """Compare each variant's logits on `token_ids` [T] with the reference's, itself among them.

    A model takes `media` with all the tokens that stand for them: these are read at once. `long` is where
    `token_ids` are from, if they ask questions.
    """
    forget_positions(setup.model)
    arguments, name = media_arguments(setup.model, media), cache_argument(setup.model)
    # the logits of a long document do not fit into memory
    size = max(1, min(_TOKENS, _LOGITS // setup.model.config.get_text_config().vocab_size))
    caches = [(variant, new_cache(setup.model)) for variant in (UNCHANGED, *variants)]
    parts: dict[str, list[Divergence]] = {variant.name: [] for variant, _ in caches}
    for rows in chunks(len(token_ids), len(token_ids) if media else size):
        chunk, following = token_ids[rows], token_ids[rows.start + 1 : rows.stop + 1]
        reference = None
        for variant, cache in caches:
            logits = _read(setup, variant, chunk, {**arguments, name: cache})
            reference = reference or ReferenceLogits(logits)
            part = compare(reference, logits, following)
            if long is not None:
                part = part._replace(margins=long.margins(logits, rows.start))
            parts[variant.name].append(part)
    return {name: join(each) for name, each in parts.items()}


def _read(
    setup: Setup, variant: Variant, token_ids: Tensor, arguments: Mapping[str, Tensor | Cache]
) -> Tensor:
    """Return the logits [T, V] of `token_ids` [T], which follow those in a cache."""
    ids = token_ids[None].to(setup.model.device)
    with variant.apply(setup):
        logits: Tensor = setup.model(input_ids=ids, use_cache=True, **arguments).logits
    return logits[0]


def _write(setup: Setup, variant: Variant, text: EvaluationText) -> tuple[list[list[int]], list[bool]]:
    """Return greedy texts after all prompts, and which passkeys are retrieved."""
    with variant.apply(setup):
        texts = _continue_greedily(setup, text.prompts, text.new_tokens)
        return texts, _retrieve(setup, text.passkeys)


def _continue_greedily(setup: Setup, prompts: Sequence[Tensor], count: int) -> list[list[int]]:
    """Write `count` greedy tokens after each prompt [T]; all prompts have the same length."""
    if not prompts:
        return []
    ids = torch.stack(list(prompts)).to(setup.model.device)
    output = setup.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        use_cache=True,
    )
    tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return tokens


def _count_same(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens before the two first differ."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))


def _retrieve(setup: Setup, passkeys: Sequence[Passkey]) -> list[bool]:
    """Return whether the model's continuation of each prompt starts with its key."""
    retrieved: dict[int, bool] = {}
    for length in {len(passkey.prompt) for passkey in passkeys}:
        indices = [i for i, passkey in enumerate(passkeys) if len(passkey.prompt) == length]
        count = max(len(setup.tokenizer(passkeys[i].key)["input_ids"]) for i in indices) + 2
        texts = _continue_greedily(setup, [passkeys[i].prompt for i in indices], count)
        for i, tokens in zip(indices, texts, strict=True):
            retrieved[i] = setup.tokenizer.decode(tokens).strip().startswith(passkeys[i].key)
    return [retrieved[i] for i in range(len(passkeys))]


def written_texts(setup: Setup, text: EvaluationText, measured: dict[str, VariantResults]) -> Texts:
    """Decode the greedy texts of `measured`, cut where they leave the reference's."""
    tokenizer = setup.tokenizer
    continuations = {
        name: [_cut_text(tokenizer, *pair) for pair in zip(m.texts, m.same_tokens, strict=True)]
        for name, m in measured.items()
        if m.texts
    }
    prompts = [tokenizer.decode(prompt) for prompt in text.prompts]
    return Texts(prompts=prompts, continuations=continuations)


def _cut_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], count: int) -> Continuation:
    """Decode `ids`, cut after the first `count` tokens."""
    whole, start = tokenizer.decode(ids), tokenizer.decode(ids[:count])
    # a character of several tokens may be cut in two: it belongs to the second part
    start = start if whole.startswith(start) else start.rstrip("\ufffd")
    return Continuation(same_tokens=count, start=start, end=whole.removeprefix(start))


def choose_searched(variants: Sequence[Variant]) -> Variant:
    """Return the first of --scales, or else `attn_head`, or any scales that engines load; refuse without."""
    ranks = {"given": 0, "attn_head": 1}
    loadable = [variant for variant in variants if variant.is_loadable]
    if not loadable:
        raise InputError("a search needs scales that engines load: give --scales or keep attn_head")
    return min(loadable, key=lambda v: min(ranks.get(v.kind, 2), ranks.get(v.name, 2)))


@torch.inference_mode()
def search_layers(
    setup: Setup, variants: Sequence[Variant], documents: Sequence[Tensor], budget: float
) -> Search:
    """Keep the layers that diverge most in 16 bits, as few as the budget allows on `documents` [T].

    Layers are ranked by the KL of each alone in FP8; that of several is measured, not added up.
    """
    variant = choose_searched(variants)
    layers = list(variant.layers)

    def kl(skipped: Iterable[int]) -> float:
        layers_in_fp8 = set(layers) - set(skipped)
        stage = f"search: {len(layers_in_fp8)} of {len(layers)} layers in FP8"
        return _mean_kl(setup, stage, variant, [layers_in_fp8], documents)[0] if layers_in_fp8 else 0.0

    stage = "search: each layer alone"
    kl_alone = _mean_kl(setup, stage, variant, [{layer} for layer in layers], documents)
    alone = dict(zip(layers, kl_alone, strict=True))
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


def _mean_kl(
    setup: Setup, stage: str, variant: Variant, subsets: Sequence[set[int]], documents: Sequence[Tensor]
) -> list[float]:
    """Measure the mean KL over all tokens of `documents` with each of these subsets of layers in FP8."""
    variants = [_only(variant, layers) for layers in subsets]
    total = [0.0] * len(variants)
    reads = [(document, rows) for document in documents for rows in chunks(len(variants), _AT_ONCE)]
    for token_ids, rows in setup.progress.each(stage, reads, "reads"):
        divergences = setup.saved.once(compare_variants, setup, token_ids, variants[rows])
        for i in range(len(variants))[rows]:
            total[i] += float(divergences[variants[i].name].kl.double().sum())
    tokens = sum(map(len, documents))
    return [kl / tokens for kl in total]


def _only(variant: Variant, layers: set[int]) -> Variant:
    """Keep the scales of `layers` alone."""
    assert variant.scales is not None
    scales = {n: s for n, s in variant.scales.layers.items() if s.layer_idx in layers}
    name = f"layers {sorted(layers)}"
    return replace(variant, name=name, scales=replace(variant.scales, layers=scales))
