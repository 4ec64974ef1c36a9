"""Variants to compare with the reference: scales, single tensors in FP8, and controls."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.caches.rounding import CacheRounding, round_fp8, rounded_attention
from calib.caches.types import Layers
from calib.choices import REFERENCE, VARIANTS, AttentionMode
from calib.errors import InputError
from calib.evaluate.attention_modes import scales_problem, simulate_attention
from calib.evaluate.resume import UNSAVED, SavedResults
from calib.progress import SILENT, Progress
from calib.scales.observers import AbsMax, Mse
from calib.scales.scales import KVScales, LayerScales
from calib.scales.stats import KVStats, TensorStats
from fp8kv_runtime.fp8 import FP8_DTYPES
from fp8kv_runtime.hf import Backend, fp8_attention, swap_attention
from fp8kv_runtime.hf.swap import Replacement

ONE_ATTENTION = (
    "this model computes the same with one attention implementation alone: the control `eager` is "
    "left out, and the noise floor is that of `bf16`"
)
# with eager attention transformers masks their text causally, with another it does not
_MASKED_OTHERWISE = ("paligemma",)
BUILT_IN = (REFERENCE, *VARIANTS)


@dataclass(frozen=True)
class Setup:
    """A model, the backend and attention of its FP8 caches, and the progress to report to."""

    source: PreTrainedModel | Callable[[], PreTrainedModel]  # loaded, or to be when it is first needed
    tokenizer: PreTrainedTokenizerBase
    backend: Backend = "auto"
    progress: Progress = SILENT
    attention: AttentionMode = "exact"  # of FP8 caches
    saved: SavedResults = UNSAVED

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model in memory."""
        return self.source if isinstance(self.source, PreTrainedModel) else self.source()

    @property
    def resolved_backend(self) -> str:
        """The backend that `auto` stands for on the model's device."""
        automatic = "triton" if self.model.device.type == "cuda" else "torch"
        automatic = automatic if self.attention == "exact" else "torch"
        return automatic if self.backend == "auto" else self.backend


@dataclass(frozen=True)
class Variant:
    """A way to hold K and V: by `rounding`, else by `scales`, else as they are."""

    name: str
    description: str  # for the report
    kind: Literal["reference", "control", "fp8", "given", "cache"]
    scales: KVScales | None = None  # static FP8
    tensors: str = "kv"  # which of q, k and v are rounded to FP8
    eager: bool = False  # control: the reference through another attention kernel
    cache: str | None = None  # a type of `calib.caches`
    rounding: CacheRounding | None = None
    is_baked: bool = False  # on weights as `fp8kv bake` writes them
    bytes_per_token: int | None = None

    @cached_property
    def layers(self) -> dict[int, LayerScales]:
        """The scales by layer_idx."""
        return {} if self.scales is None else {s.layer_idx: s for s in self.scales.layers.values()}

    @property
    def is_fp8_cache(self) -> bool:
        """Return whether K and V are in FP8 with static scales, so that attention can be simulated."""
        return self.scales is not None and {"k", "v"} <= set(self.tensors)

    @property
    def is_whole_cache(self) -> bool:
        """Return whether it caches K and V, not one of them alone, so that text can be written on it."""
        return self.is_fp8_cache or self.cache is not None

    @property
    def is_calibrated(self) -> bool:
        """Return whether its scales were measured, and are not 1.0 for lack of any."""
        return self.scales is not None and self.name != "none"

    def layers_in_16_bits(self, layers: Layers) -> set[int]:
        """Return those of the model's `layers` without scales, beside others that have some."""
        return layers.shapes.keys() - set(self.layers) if self.scales else set()

    @property
    def is_loadable(self) -> bool:
        """Return whether engines load such scales: E4M3, per tensor or head, for K and V."""
        scales = self.scales
        if scales is None or self.tensors != "kv" or scales.fp8_dtype == "e5m2":
            return False
        return scales.strategy != "channel" and not scales.has_center

    @contextmanager
    def apply(self, setup: Setup) -> Iterator[None]:
        """Hold K and V this way inside the block."""
        model = setup.model
        with ExitStack() as stack:
            if self.eager:
                stack.callback(model.set_attn_implementation, model.config._attn_implementation)
                model.set_attn_implementation(other_attention(model))
            elif self.rounding is not None:
                stack.enter_context(rounded_attention(model, self.rounding))
            elif self.scales is not None and not self.is_fp8_cache:
                stack.enter_context(rounded_attention(model, fp8_rounding(self.scales, self.tensors)))
            elif self.scales is not None and (engine := self.engine_attention(setup)) is not None:
                stack.enter_context(swap_attention(model, engine))
                stack.enter_context(fp8_attention(model, self.scales, backend="torch"))
            elif self.scales is not None:
                query = "q" in self.tensors
                stack.enter_context(
                    fp8_attention(model, self.scales, backend=setup.backend, quantize_query=query)
                )
            yield

    def engine_attention(self, setup: Setup) -> Replacement | None:
        """Return the attention of the engine that the setup simulates; None: the model's own."""
        if setup.attention == "exact" or self.scales is None or not self.is_fp8_cache:
            return None
        with_queries = "q" in self.tensors or self.kind == "given"  # which the engine would load
        dtype = setup.model.dtype
        return simulate_attention(setup.attention, self.scales, with_queries=with_queries, dtype=dtype)

    def round_query(self, layer_idx: int, query: Tensor) -> Tensor:
        """Round `query` [B, H, T, D] to FP8 and back where the variant has queries in FP8."""
        scale = self.layers[layer_idx].q
        if self.scales is None or scale is None or "q" not in self.tensors:
            return query
        return round_fp8(query, broadcast_scale(scale, query), FP8_DTYPES[self.scales.fp8_dtype])


UNCHANGED = Variant(REFERENCE, "the model's own cache", "reference")


def build_variants(stats: KVStats, random_stats: KVStats) -> list[Variant]:
    """Make all variants, controls first, from statistics with means and histograms."""
    per_layer = partial(stats.scales, strategy="tensor")
    tensor = per_layer(observer=AbsMax())
    later = drop_first_tokens(stats).scales(strategy="tensor", observer=AbsMax())
    e5m2 = per_layer(observer=AbsMax(), fp8_dtype="e5m2")
    mse = per_layer(observer=Mse(FP8_DTYPES["e4m3fn"]))
    random = random_stats.scales(strategy="tensor", observer=AbsMax())
    variants = [
        Variant("bf16", "K and V rounded to bfloat16", "control", rounding=_round_bfloat16),
        Variant("eager", "the reference through another attention kernel", "control", eager=True),
        Variant("none", "scale 1.0, what engines use without scales", "fp8", _set_ones(tensor)),
        Variant("e5m2", "one scale per layer, e5m2", "fp8", e5m2),
        Variant("tensor", "one scale per layer", "fp8", tensor),
        Variant("rest", "one scale per layer, without each sample's first token", "fp8", later),
        Variant("mse", "one scale per layer, observer mse", "fp8", mse),
    ]
    if stats.latent:  # which has no finer scales
        variants += [
            Variant("k only", "the latent alone in FP8", "fp8", tensor, "k"),
            Variant("v only", "k_pe alone in FP8", "fp8", tensor, "v"),
        ]
    else:
        absmax = partial(stats.scales, observer=AbsMax(), targets="qkv")
        head = absmax(strategy="attn_head")
        channel, centred = (absmax(strategy="channel", center_keys=centre) for centre in (False, True))
        variants += [
            Variant("attn_head", "one scale per KV head", "fp8", head),
            Variant("channel", "one scale per channel", "fp8", channel),
            Variant("k only", "K alone in FP8, one scale per KV head", "fp8", head, "k"),
            Variant("v only", "V alone in FP8, one scale per KV head", "fp8", head, "v"),
            Variant("qkv", "queries in FP8 as well, one scale per head", "fp8", head, "qkv"),
            Variant("channel+k_center", "per channel, K's mean subtracted", "fp8", centred),
            Variant("k only+k_center", "K alone, per channel, mean subtracted", "fp8", centred, "k"),
        ]
    return [*variants, Variant("random", "one scale per layer, from random token ids", "fp8", random)]


def drop_first_tokens(stats: KVStats) -> KVStats:
    """Keep only the amax of K and V of each head without the first token of every sample, [H, 1].

    Engines see that token once per sequence. A head that has nothing else keeps its amax.
    Statistics without positions are refused.
    """

    def drop(tensor: TensorStats) -> TensorStats:
        if tensor.positions is None:
            raise InputError("these statistics do not say where amax was seen; calibrate again")
        amax = tensor.positions[:, 1:].amax(1, keepdim=True)
        return TensorStats(torch.where(amax > 0, amax, tensor.amax.amax(1, keepdim=True)))

    layers = {name: replace(layer, k=drop(layer.k), v=drop(layer.v)) for name, layer in stats.layers.items()}
    return KVStats(layers, stats.shared, stats.text)


def _set_ones(scales: KVScales) -> KVScales:
    one = torch.ones(1)
    layers = {name: LayerScales(s.layer_idx, one, one, latent=s.latent) for name, s in scales.layers.items()}
    return KVScales("tensor", "e4m3fn", layers, scales.shared)


def select_variants(
    setup: Setup, variants: Sequence[Variant], names: Sequence[str] | None
) -> tuple[list[Variant], list[str]]:
    """Return the variants that can be measured in the setup's mode, and warnings on all that cannot.

    FP8 caches that the kernel does not take are left out, and refused with an InputError where their scales
    were given or `names` has them. All but FP8 caches of K and V is measured with exact attention.
    """
    mode, flag = setup.attention, f"--attention {setup.attention}"
    if mode == "exact":
        return list(variants), []
    caches = {v.name: v.scales for v in variants if v.is_fp8_cache and v.scales}
    problems = {name: why for name, scales in caches.items() if (why := scales_problem(mode, scales))}
    for variant in variants:
        if variant.name in problems and (variant.kind == "given" or variant.name in (names or ())):
            raise InputError(f"{flag}: '{variant.name}' has {problems[variant.name]}; leave it out")
    measured = [variant for variant in variants if variant.name not in problems]
    warnings = [f"{flag}: '{name}' has {why}: left out" for name, why in problems.items()]
    if exact := ", ".join(variant.name for variant in measured if not variant.is_fp8_cache):
        warnings.append(f"{flag}: no whole FP8 cache, so measured with exact attention: {exact}")
    return measured, warnings


def fp8_rounding(scales: KVScales, tensors: str = "kv") -> CacheRounding:
    """Return the rounding to FP8 and back of those of K and V that `tensors` names."""
    layers = {layer.layer_idx: layer for layer in scales.layers.values()}
    dtype = FP8_DTYPES[scales.fp8_dtype]

    def round_layer(layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        layer = layers.get(layer_idx)
        if layer is None:
            return key, value
        if "k" in tensors:
            k_scale = broadcast_scale(layer.k, key)
            if layer.k_center is None:
                key = round_fp8(key, k_scale, dtype)
            else:
                centre = broadcast_scale(layer.k_center, key)
                key = (round_fp8(key - centre, k_scale, dtype) + centre).to(key.dtype)
        if "v" in tensors:
            value = round_fp8(value, broadcast_scale(layer.v, value), dtype)
        return key, value

    return round_layer


def broadcast_scale(scale: Tensor, x: Tensor) -> Tensor:
    """View scales [1], [H'] or [H', D], H' a divisor of H, so that they fit `x` [B, H, T, D]."""
    scale = scale.to(x.device)
    if scale.shape[0] > 1:
        scale = scale.repeat_interleave(x.shape[1] // scale.shape[0], 0)
    return scale.view(-1, 1, 1) if scale.dim() == 1 else scale.unsqueeze(1)


def _round_bfloat16(layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype)


def other_attention(model: PreTrainedModel) -> str | None:
    """Return another implementation of attention than the model's own; None: none computes the same."""
    if model.config.model_type in _MASKED_OTHERWISE:
        return None
    if model.config._attn_implementation != "eager":
        return "eager"
    return "sdpa" if model._supports_sdpa else None
