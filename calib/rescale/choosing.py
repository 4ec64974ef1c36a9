"""Factors of K and V from what was measured: for FP8 at scale 1.0, and for integers."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.capture.attention import CachedAttention
from calib.choices import Purpose
from calib.errors import InputError
from calib.rescale.pairs import pairs_of
from calib.rescale.parameters import normalises_v, shares_k
from calib.rescale.products import Factors, LayerFactors
from calib.scales.scales import KVScales
from calib.scales.stats import KVStats

# a channel is enlarged by no more than this: its amax on other text may be larger
_LARGEST = 2.0**10
# the best of 0.5, 0.7 and 1 on five documents for SmolLM2; other models were not tried
_POWER, _POWER_OF_ANY = 0.5, 0.7


def factors_for_fp8(
    scales: KVScales, model: PreTrainedModel, modules: Mapping[str, CachedAttention]
) -> Factors:
    """Powers of two, per KV head where the weights allow it, that bring scales into (1/2, 1].

    `scales` are those of the model per KV head, of `per_part` statistics.
    """
    found = {}
    for name, module in modules.items():
        layer = scales.layers[name]
        k = layer.k.amax().expand_as(layer.k) if shares_k(model, module) else layer.k
        dims = (module.head_dim, module.v_head_dim)
        k, v = (
            _octave(scale)[:, None].expand(-1, dim) for scale, dim in zip((k, layer.v), dims, strict=True)
        )
        found[name] = LayerFactors(k, _reaching(v, model, module))
    return found


def per_part(stats: KVStats) -> KVStats:
    """The statistics with latents and k_pe as K and V of one head each, to get a scale of each."""
    layers = {name: replace(layer, latent=False) for name, layer in stats.layers.items()}
    return replace(stats, layers=layers)


def factors_for_int8(
    stats: KVStats,
    model: PreTrainedModel,
    modules: Mapping[str, CachedAttention],
    *,
    any_factor: bool = False,
) -> Factors:
    """Factors that bring the channels of a KV head nearer to its largest one.

    K's are of RoPE pairs, V's of channels: a power of `largest / amax`, rounded to a power of two
    unless `any_factor`.
    """
    pairs = pairs_of(model, modules)
    found = {}
    for name, module in modules.items():
        k = stats.layers[name].k.amax
        k = k.maximum(k[:, pairs[name]])
        rows = k.amax(0, keepdim=True) if shares_k(model, module) else k
        # evened once: the powers of one number differ by where it lies in memory
        of_k, of_v = (_evened(amax, any_factor) for amax in (rows, stats.layers[name].v.amax))
        found[name] = LayerFactors(of_k.expand_as(k), _reaching(of_v, model, module))
    return found


def _reaching(v: Tensor, model: PreTrainedModel, module: CachedAttention) -> Tensor:
    """V's factors, or ones where the model normalises V: it then fits FP8 at 1.0 as it is."""
    return torch.ones_like(v) if normalises_v(model, module) else v


def check_purpose(stats: KVStats, purpose: Purpose) -> None:
    """Refuse integers for a model that caches latents."""
    if stats.latent and purpose == "int8":
        raise InputError(
            "--for int8: this model caches latents (MLA), which no engine holds as integers: these "
            "are of K and V per head; use --for fp8"
        )


def check_finite(stats: KVStats, given: str) -> None:
    """Refuse statistics with NaN or Inf."""
    for name, layer in stats.layers.items():
        if not (layer.k.amax.isfinite().all() and layer.v.amax.isfinite().all()):
            raise InputError(f"'{given}' saw NaN or Inf in {name}; calibrate again")


def _octave(scale: Tensor) -> Tensor:
    """The power of two that brings each scale into (1/2, 1]."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), -exponent + (mantissa == 0.5).int())


def _evened(amax: Tensor, any_factor: bool) -> Tensor:
    """Factors [H, D] for channels of `amax` [H, D]."""
    largest = amax.amax(-1, keepdim=True)
    ratio = torch.where(amax > 0, largest / amax, 1.0).clamp(max=_LARGEST)
    ratio = ratio ** (_POWER_OF_ANY if any_factor else _POWER)
    return ratio if any_factor else torch.exp2(ratio.log2().round())
