"""`--search KL`: the fewest layers to leave in 16 bits so that the divergence stays in a budget."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from calib.eval.reader import read
from calib.eval.schema import Search
from calib.eval.statistics import chunks
from calib.eval.variants import Setup, Variant

_AT_ONCE = 8  # variants, each with a cache of its own


@torch.inference_mode()
def search(setup: Setup, variant: Variant, documents: Sequence[Tensor], budget: float) -> Search:
    """Leave the layers that diverge most alone in 16 bits, as few as the budget allows.

    Layers are ranked by the KL that each causes when it alone is in FP8, and the KL of any number
    of them is measured, not added up: `kl` is what the whole model does with `skipped`.
    """
    layers = list(variant.layers)
    ranking = [_only(variant, {layer}) for layer in layers]

    def kl(skipped: Iterable[int]) -> float:
        kept = set(layers) - set(skipped)
        setup.progress(f"search: {len(kept)} of {len(layers)} layers in FP8")
        return _mean_kl(setup, [_only(variant, kept)], documents)[0] if kept else 0.0

    setup.progress("search: each layer alone")
    alone = dict(zip(layers, _mean_kl(setup, ranking, documents), strict=True))
    worst_first = sorted(layers, key=lambda layer: -alone[layer])
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


def skip_argument(layers: Iterable[int]) -> str:
    """What tells vLLM to keep `layers` in 16 bits."""
    return f"--kv-cache-dtype-skip-layers {' '.join(map(str, layers))}"


def _only(variant: Variant, kept: set[int]) -> Variant:
    assert variant.scales is not None
    layers = {n: s for n, s in variant.scales.layers.items() if s.layer_idx in kept}
    name = f"layers {sorted(kept)}"
    return replace(variant, name=name, scales=replace(variant.scales, layers=layers))


def _mean_kl(setup: Setup, variants: Sequence[Variant], documents: Sequence[Tensor]) -> list[float]:
    total = {variant.name: 0.0 for variant in variants}
    for token_ids in documents:
        for few in chunks(len(variants), _AT_ONCE):
            found = read(setup, token_ids, variants[few])
            for variant in variants[few]:
                total[variant.name] += float(found[variant.name].kl.double().sum())
    tokens = sum(map(len, documents))
    return [total[variant.name] / tokens for variant in variants]
