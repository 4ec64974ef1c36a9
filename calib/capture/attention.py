"""Which modules cache K and V, proved on the model itself, and how to watch them.

A short forward pass with a real cache shows what each layer stores. A module counts as cached attention only
if the K and V handed to its attention function are bitwise what the cache holds. Of multi-head latent
attention (MLA), K is the latent and V is k_pe, the shared and rotated part of the keys; the model's own
`expand_kv` makes of them what it attends to.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from inspect import signature
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.caches.types import Attention, Layers, Shape
from calib.choices import FP8Name, Strategy
from calib.errors import UnsupportedModelError
from calib.models.config import explain_nonsense, layer_settings
from calib.models.load import input_device
from calib.scales.scales import KVScales, LayerScales, SharedAttention
from fp8kv_runtime.hf import EngineQuery, cache_of, is_latent, swap_attention

# query [B, H, T, D], key and value [B, K * kv_repeat, T, D]: post-RoPE, post-QK-norm; or a latent
# [B, 1, T, R] and a k_pe [B, 1, T, P]
QKV = tuple[Tensor, Tensor, Tensor]
QKVSink = Callable[[str, Tensor, Tensor, Tensor], None]  # of a module's name, and QKV [B, heads, T, D]

_PROBE_TOKENS = 8
# kinds of layers that keep a state of fixed size, the first one beside K and V
_STATEFUL = {"hybrid", "linear_attention", "mamba", "recurrent", "conv"}
# in vLLM the embedding at position 0 is zero for MTP layers of these; in SGLang it is not
_ZERO_AT_FIRST = {"deepseek_v3", "glm4_moe", "glm4_moe_lite"}
# errors of a model that misses an image, or a field of its config that says where images are
NOT_FOR_TEXT = (TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class CachedAttention:
    """An attention module that owns a K and a V cache."""

    name: str
    layer_idx: int
    num_heads: int
    num_kv_heads: int
    kv_repeat: int  # how often transformers repeats each KV head in its cache; engines never do
    head_dim: int  # of K
    v_head_dim: int
    attention: Attention = "heads"
    readers: tuple[str, ...] = ()  # modules of other layers that attend to its cache, too

    @property
    def latent(self) -> bool:
        """Return whether it caches a latent of `head_dim` and a k_pe of `v_head_dim` values (MLA)."""
        return self.attention != "heads"

    @property
    def shape(self) -> Shape:
        """The shape of a token in its cache."""
        return Shape(self.num_kv_heads, self.head_dim, self.v_head_dim, self.attention)


@dataclass(frozen=True)
class Draft:
    """A layer that drafts tokens (MTP, EAGLE), without what K and V do not depend on."""

    model: PreTrainedModel  # with the embeddings that it reads
    inner: str  # the attention module in `model`
    module: CachedAttention  # the same, by its name and number in the checkpoint
    layers: tuple[int, ...] = ()  # whose inputs it reads; none: the model's last hidden states

    def read(self, token_ids: Tensor, hidden: Tensor) -> None:
        """Run the layer on `token_ids` [B, T] and `hidden` states, as engines do.

        `hidden` are [B, T, layers * W] of `layers` side by side, or [B, T, W] of the model.
        At position p the layer reads the embedding of token p + 1 and the hidden state of token p. One row
        comes before these, also at position 0 and with the hidden state of token 0. Its embedding is zero for
        models of `_ZERO_AT_FIRST`, as in vLLM, and else that of token 1.
        """
        model: Any = self.model
        before = (torch.arange(token_ids.shape[1], device=hidden.device) - 1).clamp(min=0)[None]
        embedded = model.embed_tokens(token_ids).to(hidden.device, copy=True)
        is_zero = model.config.model_type in _ZERO_AT_FIRST
        embedded[:, 0] = 0 if is_zero else embedded[:, :2][:, -1].clone()
        angles = model.rotary_emb(embedded, position_ids=before)
        model.layers[0](embedded, hidden[:, before[0]], angles, None, before, None)


@dataclass(frozen=True)
class AttentionMap:
    """The cached attention modules of a model, and those that read another layer's cache."""

    cached: dict[str, CachedAttention]
    shared: dict[str, SharedAttention]
    reader: str  # the module that is given token ids
    note: str = ""  # why that is the decoder, where the whole model may cache something else
    draft: Draft | None = None  # measured besides
    # of the last token, [B, 1, W]
    last_hidden: Tensor | None = field(default=None, compare=False, repr=False)

    def read(
        self, model: PreTrainedModel, token_ids: Tensor, mask: Tensor | None = None, **options: Any
    ) -> Any:
        """Run `model` on `token_ids` and `mask` [B, T], as far as what it caches needs; return its output."""
        return _run(model.get_submodule(self.reader), token_ids, mask, use_cache=False, **options)

    def unit_scales(self, strategy: Strategy = "tensor", fp8_dtype: FP8Name = "e4m3fn") -> KVScales:
        """Return scale 1.0 for every module, which engines use where they have no other."""
        one, modules = torch.ones(1), self.cached.items()
        layers = {name: LayerScales(m.layer_idx, one, one, latent=m.latent) for name, m in modules}
        return KVScales(strategy, fp8_dtype, layers, self.shared)


def observe_qkv(model: PreTrainedModel, sink: QKVSink) -> AbstractContextManager[None]:
    """Call `sink(module_name, query, key, value)` for each attention call inside the block.

    The query is the one that engines hand to attention.
    """
    names = {module: name for name, module in model.named_modules()}

    def watch(
        original: Callable[..., Any], module: nn.Module, q: Tensor, k: Tensor, v: Tensor,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if hasattr(module, "layer_idx"):  # Inkling 2 attends to outputs of its blocks too
            sink(names[module], EngineQuery.of(module, q, kwargs.get("scaling")).query, k, v)
        return original(module, q, k, v, *args, **kwargs)

    return swap_attention(model, watch)


@torch.inference_mode()
def cached_layers(model: PreTrainedModel) -> Layers:
    """Return the layers that hold a cache by index, and whether others, or parts of them, keep a state."""
    config = model.config.get_text_config(decoder=True)
    shapes = {module.layer_idx: module.shape for module in map_attention(model).cached.values()}
    is_hybrid = not _STATEFUL.isdisjoint(getattr(config, "layer_types", None) or ())
    return Layers(shapes, config.num_hidden_layers, is_hybrid)


def map_attention(model: PreTrainedModel, sample: Mapping[str, Tensor] | None = None) -> AttentionMap:
    """Find the modules that cache K and V, or latents, of `sample` (input_ids [1, T], media), or refuse."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoder-only models are supported")
    if not isinstance(model.get_decoder(), PreTrainedModel):  # ModernBERT's is its LM head
        raise UnsupportedModelError(
            f"{name} does not say which part of it is the decoder, so its attention cannot be observed; such "
            "models are not supported"
        )
    with explain_nonsense(f"this {model.config.model_type} cannot run as its config says"):
        reader, note, calls, output = _probe(model, sample)
    cache, hidden = cache_of(output), getattr(output, "last_hidden_state", None)
    if cache is None:
        if getattr(model.config, "is_decoder", None) is False:
            reason = "is an encoder: its config says is_decoder false, and it keeps no KV cache"
            raise UnsupportedModelError(f"{name} {reason}")
        raise UnsupportedModelError(
            f"{name} hands out no KV cache in transformers, so what engines cache of it cannot be observed; "
            "such models are not supported"
        )
    pairs = {i: (getattr(x, "keys", None), getattr(x, "values", None)) for i, x in enumerate(cache.layers)}
    stored = {i: (k, v) for i, (k, v) in pairs.items() if k is not None and v is not None and k.numel()}
    modules = {name: _cached_attention(model, name, qkv, stored) for name, qkv in calls.items()}
    cached = {name: module for name, module in modules.items() if module is not None}
    missing = sorted({*stored} - {module.layer_idx for module in cached.values()})
    if missing or not cached:
        raise UnsupportedModelError(
            f"{name}: layers {missing} cache K and V but call neither transformers' attention interface nor "
            "scaled_dot_product_attention, so they cannot be observed"
        )
    shared = {}
    for reading in (name for name in modules if name not in cached):
        owners = (x for x in cached if all(map(_is_equal, calls[x][1:], calls[reading][1:])))
        if (owner := next(owners, None)) is None:
            raise UnsupportedModelError(f"{reading} attends to K and V that no layer of the cache holds")
        shared[reading] = SharedAttention(int(model.get_submodule(reading).layer_idx), owner)
        cached[owner] = replace(cached[owner], readers=(*cached[owner].readers, reading))
    last_hidden = None if hidden is None else hidden[:, -1:].clone()
    return AttentionMap(cached, shared, reader, note, last_hidden=last_hidden)


def _probe(
    model: PreTrainedModel, sample: Mapping[str, Tensor] | None
) -> tuple[str, str, dict[str, QKV], Any]:
    """Return the module that reads `sample`, or text alone, a note, its calls of attention, and its output.

    That is the whole model without its LM head: what is around the decoder may move positions, as PaliGemma's
    does. The decoder reads for a model that takes no text alone, or whose other weights are not in memory;
    the note says why.
    """
    names = {module: name for name, module in model.named_modules()}
    whole, decoder = model.base_model, model.get_decoder()
    try:
        return names[whole], "", *_calls_and_output(model, whole, **(sample or {}))
    except (*NOT_FOR_TEXT, RuntimeError) as error:
        lacks_weights = "meta" in str(error) and any(p.is_meta for p in whole.parameters())
        if sample or whole is decoder or not (isinstance(error, NOT_FOR_TEXT) or lacks_weights):
            raise
        reason = shorten(str(error) or type(error).__name__, 120)
    note = f"the decoder alone was measured, as the whole model takes no text alone: {reason}"
    return names[decoder], note, *_calls_and_output(model, decoder)


def _calls_and_output(
    model: PreTrainedModel, reader: nn.Module, input_ids: Tensor | None = None, **media: Tensor
) -> tuple[dict[str, QKV], Any]:
    calls: dict[str, QKV] = {}
    if input_ids is None:
        input_ids = torch.arange(_PROBE_TOKENS, device=input_device(model))[None]
    with observe_qkv(model, lambda name, *qkv: calls.__setitem__(name, qkv)):
        out = _run(reader, input_ids, torch.ones_like(input_ids), use_cache=True, **media)
    if media and any(key.shape[2] != input_ids.shape[1] for _, key, _ in calls.values()):
        raise UnsupportedModelError(
            f"{type(model).__name__} caches K and V of pictures beside those of tokens, by cross-attention, "
            "which are not measured; calibrate it on text"
        )
    return calls, out


def _run(
    reader: nn.Module, token_ids: Tensor, mask: Tensor | None, *, use_cache: bool, **options: Any
) -> Any:
    # a reader with an LM head, as Llama 4's, would compute logits of every token
    last = {"logits_to_keep": 1} if "logits_to_keep" in signature(reader.forward).parameters else {}
    return reader(input_ids=token_ids, attention_mask=mask, use_cache=use_cache, **last, **options)


def _cached_attention(
    model: PreTrainedModel, name: str, qkv: QKV, stored: dict[int, tuple[Tensor, Tensor]]
) -> CachedAttention | None:
    """Describe the module `name`, which was called with `qkv`; None if its layer stores nothing."""
    query, key, value = qkv
    module = model.get_submodule(name)
    # a block that several layers share does not know its layer, but for its name
    index = next((i for i in stored if f".{i}." in name and _are_kept(qkv, stored[i])), module.layer_idx)
    if index not in stored and index is not None and index >= 0:
        return None
    if index not in stored or not _are_kept(qkv, stored[index]):
        if index not in stored or any(_is_equal(keys, key) for i, (keys, _) in stored.items() if i != index):
            raise UnsupportedModelError(
                f"{name} is of a block that several layers share, and does not know whose cache it fills, so "
                "scales have no place: such models are not supported"
            )
        raise UnsupportedModelError(
            f"{name} caches {list(stored[index][0].shape)} but attends to {list(key.shape)}: it changes K "
            "or V after they are cached, so what engines cache is not known"
        )
    attention: Attention = "heads"
    if is_latent(module):
        # a layer without an indexer of its own may use that of the layer before it
        attention = "sparse latents" if getattr(module, "indexer", False) is not False else "latents"
    if hasattr(module, "kv_b_proj") and not (is_latent(module) and value.numel()):
        lacks = "k_pe" if is_latent(module) else "expand_kv to tell the latent that engines cache"
        raise UnsupportedModelError(
            f"{name} is latent attention (MLA) of a kind that is not known: it has no {lacks}"
        )
    repeat = _kv_repeat(model, index, key, value)
    heads, kv_heads = query.shape[1], key.shape[1] // repeat
    return CachedAttention(
        name, int(index), heads, kv_heads, repeat, key.shape[-1], value.shape[-1], attention
    )


def _are_kept(qkv: QKV, stored: tuple[Tensor, Tensor]) -> bool:
    # a sliding-window layer keeps only its last tokens; a model with NaN is refused later
    return all(
        torch.equal(kept.nan_to_num(), x[:, :, -kept.shape[2] :].nan_to_num())
        for x, kept in zip(qkv[1:], stored, strict=True)
    )


def _is_equal(one: Tensor, two: Tensor) -> bool:
    # layers may be on several GPUs
    return one.shape == two.shape and torch.equal(one.to(two.device), two)


def _kv_repeat(model: PreTrainedModel, layer_idx: int, key: Tensor, value: Tensor) -> int:
    """Return how often K and V hold each KV head of the config; 1 unless all copies are equal."""
    layers = (layer_settings(model.config, name) for name in ("num_key_value_heads", "num_kv_heads"))
    kv_heads = next((n[layer_idx % len(n)] for n in layers if n[layer_idx % len(n)]), None)
    if not kv_heads or key.shape[1] % kv_heads:
        return 1
    repeat = key.shape[1] // int(kv_heads)
    copies = [x.view(x.shape[0], -1, repeat, *x.shape[2:]) for x in (key, value)]
    return repeat if all(torch.equal(x, x[:, :, :1].expand_as(x)) for x in copies) else 1
