"""Variants to compare with the reference: scales, single tensors in FP8, and controls."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.caches.rounding import CacheRounding, beside_queries, round_fp8, rounded_attention
from calib.choices import REFERENCE, VARIANTS, AttentionMode
from calib.errors import InputError
from calib.evaluate.simulated import simulated
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
QKV = tuple[Tensor, Tensor, Tensor]
# (layer_idx, query, key, value) -> what attention is given
Rounding = Callable[[int, Tensor, Tensor, Tensor], QKV]


@dataclass(frozen=True)
class Setup:
    """A loaded model, where its FP8 caches run, and who is told how far it is."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    backend: Backend = "auto"
    progress: Progress = SILENT
    attention: AttentionMode = "exact"  # of FP8 caches

    @property
    def resolved_backend(self) -> str:
        """The backend that `auto` stands for on the model's device."""
        automatic = "triton" if self.model.device.type == "cuda" else "torch"
        automatic = automatic if self.attention == "exact" else "torch"
        return automatic if self.backend == "auto" else self.backend


@dataclass(frozen=True)
class Variant:
    """One way to hold K and V."""

    name: str
    what: str  # for the report
    kind: Literal["reference", "control", "fp8", "given", "cache"]
    scales: KVScales | None = None  # None: the reference, or a control
    tensors: str = "kv"  # which of q, k and v are rounded to FP8
    eager: bool = False  # control: the reference through another attention kernel
    cache: str | None = None  # a type of `calib.caches`, and how it rounds
    rounding: CacheRounding | None = None
    is_baked: bool = False  # on weights as `fp8kv bake` writes them
    bytes_per_token: int | None = None

    @property
    def layers(self) -> dict[int, LayerScales]:
        """The scales by layer_idx."""
        return {} if self.scales is None else _by_layer(self.scales)

    @property
    def generates(self) -> bool:
        """Whether text is generated with it: one rounded tensor alone is no FP8 cache."""
        is_fp8 = self.scales is not None and {"k", "v"} <= set(self.tensors)
        return is_fp8 or self.rounding is not None

    @property
    def in_mode(self) -> bool:
        """Whether an engine's attention is simulated for it: static FP8, of K and V."""
        return self.generates and self.scales is not None

    @property
    def served(self) -> bool:
        """Whether engines can load such scales: E4M3, per tensor or head, for K and V."""
        scales = self.scales
        if scales is None or self.tensors != "kv" or scales.fp8_dtype == "e5m2":
            return False
        return scales.strategy != "channel" and not scales.has_center

    def applied(self, setup: Setup) -> AbstractContextManager[None]:
        """Inside the block the model holds K and V this way."""
        model, query = setup.model, "q" in self.tensors
        if self.kind == REFERENCE:
            return nullcontext()
        if self.eager:
            return _eager(model)
        if self.rounding is not None:
            return rounded_attention(model, beside_queries(self.rounding))
        if self.scales is None:
            return rounded_attention(model, _to_bfloat16)
        if (engine := self.engine(setup)) is not None:
            return _simulated(model, self.scales, engine)
        if self.generates:
            return fp8_attention(model, self.scales, backend=setup.backend, quantize_query=query)
        return rounded_attention(model, fp8_rounding(self.scales, self.tensors))

    def engine(self, setup: Setup) -> Replacement | None:
        """The attention of the engine that the setup simulates; None: the model's own."""
        if setup.attention == "exact" or self.scales is None or not self.in_mode:
            return None
        with_queries = "q" in self.tensors or self.kind == "given"  # which the engine would load
        dtype = setup.model.dtype
        return simulated(setup.attention, self.scales, with_queries=with_queries, dtype=dtype)


UNCHANGED = Variant(REFERENCE, "the model's own cache", "reference")


def build_variants(stats: KVStats, random_stats: KVStats) -> list[Variant]:
    """Make all variants, controls first, from statistics with means and histograms."""
    per_layer = partial(stats.scales, strategy="tensor")
    tensor = per_layer(observer=AbsMax())
    rest = drop_first_tokens(stats).scales(strategy="tensor", observer=AbsMax())
    e5m2 = per_layer(observer=AbsMax(), fp8_dtype="e5m2")
    mse = per_layer(observer=Mse(FP8_DTYPES["e4m3fn"]))
    random = random_stats.scales(strategy="tensor", observer=AbsMax())
    return [
        Variant("bf16", "K and V rounded to bfloat16", "control"),
        Variant("eager", "the reference through another attention kernel", "control", eager=True),
        Variant("none", "scale 1.0, what engines use without scales", "fp8", all_ones(tensor)),
        Variant("e5m2", "one scale per layer, e5m2", "fp8", e5m2),
        Variant("tensor", "one scale per layer", "fp8", tensor),
        Variant("rest", "one scale per layer, without each sample's first token", "fp8", rest),
        Variant("mse", "one scale per layer, observer mse", "fp8", mse),
        *(_of_latents(tensor) if stats.latent else _of_heads(stats)),
        Variant("random", "one scale per layer, from random token ids", "fp8", random),
    ]


def drop_first_tokens(stats: KVStats) -> KVStats:
    """Keep only the amax of K and V of each head without the first token of every sample, [H, 1].

    Engines see that token once per sequence. A head that has nothing else keeps its amax.
    """

    def drop(tensor: TensorStats) -> TensorStats:
        if tensor.positions is None:
            raise InputError("these statistics do not say where amax was seen; calibrate again")
        amax = tensor.positions[:, 1:].amax(1, keepdim=True)
        return TensorStats(torch.where(amax > 0, amax, tensor.amax.amax(1, keepdim=True)))

    layers = {name: replace(layer, k=drop(layer.k), v=drop(layer.v)) for name, layer in stats.layers.items()}
    return KVStats(layers, stats.shared, stats.text)


def _of_latents(tensor: KVScales) -> list[Variant]:
    """Parts of a latent cache, which has no finer scales."""
    return [
        Variant("k only", "the latent alone in FP8", "fp8", tensor, "k"),
        Variant("v only", "k_pe alone in FP8", "fp8", tensor, "v"),
    ]


def _of_heads(stats: KVStats) -> list[Variant]:
    """Finer scales, and parts of K and V."""
    absmax = partial(stats.scales, observer=AbsMax(), targets="qkv")
    head = absmax(strategy="attn_head")
    channel, centred = (absmax(strategy="channel", center_keys=centre) for centre in (False, True))
    return [
        Variant("attn_head", "one scale per KV head", "fp8", head),
        Variant("channel", "one scale per channel", "fp8", channel),
        Variant("k only", "K alone in FP8, one scale per KV head", "fp8", head, "k"),
        Variant("v only", "V alone in FP8, one scale per KV head", "fp8", head, "v"),
        Variant("qkv", "queries in FP8 as well, one scale per head", "fp8", head, "qkv"),
        Variant("channel+k_center", "per channel, K's mean subtracted", "fp8", centred),
        Variant("k only+k_center", "K alone, per channel, mean subtracted", "fp8", centred, "k"),
    ]


def _by_layer(scales: KVScales) -> dict[int, LayerScales]:
    return {layer.layer_idx: layer for layer in scales.layers.values()}


def fp8_rounding(scales: KVScales, tensors: str) -> Rounding:
    """Round those of q, k and v that `tensors` names to FP8 and back."""
    layers, dtype = _by_layer(scales), FP8_DTYPES[scales.fp8_dtype]

    def rounded(layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> QKV:
        layer = layers.get(layer_idx)
        if layer is None:
            return query, key, value
        if "q" in tensors and layer.q is not None:
            query = _round_fp8(query, layer.q, dtype)
        if "k" in tensors:
            centre = 0.0 if layer.k_center is None else broadcast_scale(layer.k_center, key)
            key = (_round_fp8(key - centre, layer.k, dtype) + centre).to(key.dtype)
        if "v" in tensors:
            value = _round_fp8(value, layer.v, dtype)
        return query, key, value

    return rounded


def _round_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return round_fp8(x, broadcast_scale(scale, x), dtype)


def broadcast_scale(scale: Tensor, x: Tensor) -> Tensor:
    """View scales [1], [H'] or [H', D], H' a divisor of H, so that they fit `x` [B, H, T, D]."""
    scale = scale.to(x.device)
    if scale.shape[0] > 1:
        scale = scale.repeat_interleave(x.shape[1] // scale.shape[0], 0)
    return scale.view(-1, 1, 1) if scale.dim() == 1 else scale.unsqueeze(1)


def all_ones(scales: KVScales) -> KVScales:
    """Scale 1.0 for the layers of `scales`."""
    one = torch.ones(1)
    layers = {name: LayerScales(s.layer_idx, one, one, latent=s.latent) for name, s in scales.layers.items()}
    return KVScales("tensor", "e4m3fn", layers, scales.shared)


def _to_bfloat16(layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> QKV:
    return query, key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype)


@contextmanager
def _simulated(model: PreTrainedModel, scales: KVScales, engine: Replacement) -> Iterator[None]:
    with swap_attention(model, engine), fp8_attention(model, scales, backend="torch"):
        yield


def other_attention(model: PreTrainedModel) -> str | None:
    """Another implementation of attention than the model's own; None: none computes the same."""
    if model.config.model_type in _MASKED_OTHERWISE:
        return None
    if model.config._attn_implementation != "eager":
        return "eager"
    return "sdpa" if model._supports_sdpa else None


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(other_attention(model))
    try:
        yield
    finally:
        model.set_attn_implementation(before)
