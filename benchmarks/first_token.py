"""Why centred keys need exact scales: what rounding the first token's key alone costs.

K alone is rounded, each way on the same held-out text: all tokens, all but the first, and only the
first. "bound" takes `amax + |mean|` for the largest residual, "exact" measures it.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from evaluation import MODEL, prepared
from machine import machine, write_result
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.caches.rounding import CacheRounding
from calib.divergence import divergence
from calib.evaluate.variants import Variant, fp8_rounding
from calib.scales.scales import KVScales
from calib.scales.stats import KVStats
from fp8kv_runtime.hf import swap_attention

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--date", help="date to record; default: today")
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "first_token.json")
    args = parser.parse_args()
    facts = machine(args.date)
    model, variants, documents, stats = prepared(MODEL)
    by_name = {variant.name: variant for variant in variants}
    exact = by_name["channel+k_center"].scales
    assert exact is not None
    kinds = {
        "attn_head": _of(by_name["attn_head"]),
        "channel+k_center, bound": fp8_rounding(_bound(exact, stats), "k"),
        "channel+k_center, exact": fp8_rounding(exact, "k"),
    }
    rows = {name: _measure(model, rounding, documents) for name, rounding in kinds.items()}
    print(rows)
    write_result(args.output, {"machine": facts, "model": MODEL, "kl_of_k_alone": rows})


def _of(variant: Variant) -> CacheRounding:
    assert variant.scales is not None
    return fp8_rounding(variant.scales, "k")


def _bound(scales: KVScales, stats: KVStats) -> KVScales:
    layers = {}
    for name, layer in scales.layers.items():
        assert layer.k_center is not None
        amax = stats.layers[name].k.amax + layer.k_center.abs()
        layers[name] = replace(layer, k=amax / E4M3_MAX)
    return replace(scales, layers=layers)


@torch.inference_mode()
def _measure(model: PreTrainedModel, rounding: CacheRounding, documents: list[Tensor]) -> dict[str, Any]:
    kept: dict[str, Callable[[Tensor, Tensor], None]] = {
        "all tokens": lambda rounded, key: None,
        "all but the first": lambda rounded, key: rounded[:, :, :1].copy_(key[:, :, :1]),
        "only the first": lambda rounded, key: rounded[:, :, 1:].copy_(key[:, :, 1:]),
    }
    kl: dict[str, list[Tensor]] = {name: [] for name in kept}
    for token_ids in documents:
        reference = model(token_ids[None], use_cache=False).logits[0].float()
        for name, keep in kept.items():
            with swap_attention(model, _attend(rounding, keep)):
                logits = model(token_ids[None], use_cache=False).logits[0].float()
            kl[name].append(divergence(reference, logits))
    return {name: float(torch.cat(each).mean()) for name, each in kl.items()}


def _attend(rounding: CacheRounding, keep: Callable[[Tensor, Tensor], None]) -> Callable[..., Any]:
    def attend(
        original: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        layer_idx: Any = module.layer_idx
        rounded, _ = rounding(layer_idx, key, value)
        rounded = rounded.clone()
        keep(rounded, key)
        return original(module, query, rounded, value, *args, **kwargs)

    return attend


if __name__ == "__main__":
    main()
