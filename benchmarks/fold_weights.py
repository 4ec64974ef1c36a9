"""Would other factors of K and V suit an INT8 cache better than those that `fp8kv bake` chooses?

Candidates: each RoPE pair of K weighted by the mean square of its queries (MixKVQ), alone or with the amax;
V's channels weighted by what the output projection makes of them; other powers of the amax. All are rounded
to powers of two, as weights must be. KL of `int8_per_token_head` on held-out documents of the quick suite.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine, write_result
from torch import Tensor

from calib.evaluate import run
from calib.evaluate.cache_variants import _bake_variant, _make_variant
from calib.evaluate.inputs import SUITES, whole_text_only
from calib.evaluate.measure import compare_variants
from calib.evaluate.statistics import ratio
from calib.evaluate.summarize import Evaluation
from calib.models.load import served_dtype
from calib.progress import SILENT
from calib.recipe import load_recipe
from calib.rescale.bake import baked_factors
from calib.rescale.rope_pairs import find_pairs, fold_pairs
from calib.rescale.stored_weights import StoredModel
from calib.rescale.weight_changes import LayerFactors
from fp8kv_runtime.hf import swap_attention

CACHE = "int8_per_token_head"
Factors = dict[int, Tensor]  # [K, D] by layer


def main() -> None:
    """Measure every candidate beside bake's own factors, print the ratios, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:smollm2")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/fold_weights.json"))
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    evaluation = open_evaluation(args.model)
    plain = _make_variant(CACHE, "", evaluation.layers, served_dtype(evaluation.checkpoint))
    variants = [plain]
    for name, k, v in candidates(evaluation):
        factors = {layer: LayerFactors(k[layer], v[layer]) for layer in k}
        variants.append(replace(_bake_variant(plain, factors), name=name))
    sums: dict[str, list[Any]] = {variant.name: [] for variant in variants}
    for document in evaluation.text.documents:
        divergences = compare_variants(evaluation.setup, document, variants)
        for name in sums:
            sums[name].append(divergences[name].kl.double().numpy())
    facts: dict[str, Any] = {"machine": machine(), "model": args.model, "cache": CACHE, "candidates": {}}
    for name, documents in sums.items():
        figure = ratio(*(np.array([kl.sum() for kl in sums[x]]) for x in (name, "bake")))
        kl = float(np.concatenate(documents).mean())
        facts["candidates"][name] = {"kl": kl, "of bake's": figure.model_dump()}
        print(f"{name:28} KL {kl:.3g}, {figure.value:.2f}x [{figure.low:.2f}, {figure.high:.2f}] of bake's")
    write_result(args.output, facts)


def open_evaluation(model: str) -> Evaluation:
    """Load model and text, and calibrate, as `fp8kv-eval` does."""
    settings = {"evaluation.caches": [CACHE], "evaluation.variants": [], "device": "cpu"}
    recipe = load_recipe(None, {"data.dataset": "builtin:python-docs", **settings})
    evaluation = run.open_inputs(model, recipe, (), whole_text_only(SUITES["quick"]), None)
    run._load_model_and_text(evaluation, SILENT)
    run._calibrate(evaluation)
    return evaluation


def candidates(evaluation: Evaluation) -> Iterator[tuple[str, Factors, Factors]]:
    """Yield the name of each candidate, K's factors and V's."""
    model, stats = evaluation.setup.model, evaluation.stats
    source = StoredModel(model, evaluation.checkpoint)
    names = {module.layer_idx: name for name, module in source.modules.items()}
    partners = find_pairs(model, source.modules)
    pairs = {layer: partners[name] for layer, name in names.items()}
    queries, keys, values = mean_squares(evaluation)
    amax = {layer: fold_pairs(stats.layers[name].k.amax, pairs[layer]) for layer, name in names.items()}
    baked, _ = baked_factors(model, evaluation.checkpoint, stats, "int8")
    bake_k, bake_v = ({layer: getattr(x, part) for layer, x in baked.items()} for part in "kv")

    def each(factor: Callable[[int], Tensor]) -> Factors:
        return {layer: _powers_of_two(factor(layer)) for layer in names}

    def pair_mean(squares: Tensor, layer: int) -> Tensor:
        return (squares + squares[..., pairs[layer]]) / 2

    def weigh(layer: int, power: float, of_queries: float) -> Tensor:
        q = pair_mean(queries[layer], layer)
        return amax[layer].double().pow(-power) * q.pow(of_queries)

    def project(layer: int) -> Tensor:
        module, weight = source.modules[names[layer]], model.get_submodule(names[layer]).o_proj.weight
        columns = weight.double().pow(2).sum(0).view(module.num_kv_heads, -1, module.v_head_dim)
        return columns.sum(1)

    by_queries = each(lambda i: (pair_mean(queries[i], i) / pair_mean(keys[i], i)).pow(0.25))
    by_projection = each(lambda i: (project(i) / values[i]).pow(0.25))
    yield "bake", bake_k, bake_v
    yield "K by queries / keys", by_queries, bake_v
    for power, of_queries in ((0.4, 0.0), (0.6, 0.0), (0.5, 0.03), (0.5, 0.06), (0.5, 0.12), (0.5, 0.25)):
        k = each(lambda i, power=power, share=of_queries: weigh(i, power, share))  # type: ignore[misc]
        yield f"K amax^-{power} q2^{of_queries}", k, bake_v
    yield "V by output projection", bake_k, by_projection
    yield "both", by_queries, by_projection


def mean_squares(evaluation: Evaluation) -> tuple[Factors, Factors, Factors]:
    """Return the summed squares of Q, K and V [K, D] by layer, over the calibration's samples."""
    totals: tuple[Factors, Factors, Factors] = ({}, {}, {})

    def attend(original: Any, module: Any, *qkv: Any, **options: Any) -> Any:
        query, key, value, *rest = qkv
        grouped = query.double().pow(2).sum((0, 2)).unflatten(0, (key.shape[1], -1)).sum(1)
        squares = grouped, *(x.double().pow(2).sum((0, 2)) for x in (key, value))
        for total, square in zip(totals, squares, strict=True):
            total[module.layer_idx] = total.get(module.layer_idx, 0) + square
        return original(module, query, key, value, *rest, **options)

    with swap_attention(evaluation.setup.model, attend):
        for sample in evaluation.text.calibration.samples:
            evaluation.setup.model(input_ids=torch.tensor([sample]))
    return totals


def _powers_of_two(factors: Tensor) -> Tensor:
    """Round `factors` [K, D] to powers of two, the smallest of each head about 1."""
    return torch.exp2((factors / factors.amin(-1, keepdim=True)).log2().round()).float()


if __name__ == "__main__":
    main()
