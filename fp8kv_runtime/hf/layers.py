"""One attention layer of a transformers cache, stored in FP8 blocks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from fp8kv_runtime import ops, reference
from fp8kv_runtime.cache import PagedKVCache
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf.batch import CacheRows
from fp8kv_runtime.hf.given import ModuleScales, for_heads, of_latent
from fp8kv_runtime.storage import KVBlocks


class Fp8CacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer of a transformers cache, in FP8 blocks.

    A token's latent and k_pe, which have one scale, lie there as one row, in two halves. Where
    heads of K and of V differ in size, the smaller ones are filled up with zeros.
    """

    is_sliding = False  # windows are the attention's business; every token is kept
    is_croppable = True
    is_initialized: bool

    def __init__(self, batch: CacheRows, scales: ModuleScales, *, leads: bool, restore: bool) -> None:
        super().__init__()
        self.batch = batch
        self.scales = scales
        self._leads = leads
        self._restore = restore  # whether `update` returns everything, in the model's dtype
        self._length = 0
        self.values_per_token = 0  # of K and V, without what fills up heads

    def take_over(self, layer: Any) -> None:
        """Take from the layer of transformers that it stands in for what it needs."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the blocks, whose shape is that of the first keys and values [B, K, T, D]."""
        head_dim = max(key_states.shape[3], value_states.shape[3])
        self.make_blocks(key_states.shape[1], head_dim, key_states.device)

    def make_blocks(self, num_heads: int, head_dim: int, device: torch.device) -> None:
        """Make the blocks, if there are none yet."""
        if self.is_initialized:
            return
        cache, center = self.batch.cache, self.scales.k_center
        assert cache is not None
        k, v = (
            _filled(for_heads(scale, num_heads), head_dim, 1.0) for scale in (self.scales.k, self.scales.v)
        )
        if center is not None:
            center = _filled(for_heads(center, num_heads), head_dim, 0.0)
        # a later forward pass may run outside inference mode
        with torch.inference_mode(False):
            new = KVBlocks.empty(
                cache.num_blocks,
                cache.block_size,
                num_kv_heads=num_heads,
                head_dim=head_dim,
                k_scale=k,
                v_scale=v,
                k_center=center,
                dtype=self.batch.dtype,
                device=device,
            )
        cache.add_layer(self.scales.layer_idx, new)
        self.is_initialized = True

    @property
    def blocks(self) -> KVBlocks:
        """This layer's blocks; growing the pool replaces them."""
        assert self.batch.cache is not None
        return self.batch.cache.layers[self.scales.layer_idx]

    @torch.no_grad()
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store K and V [B, K, T, D]; returns what the attention function is to be given.

        With the Triton kernels that is K and V as they came, marked with this layer; else all of
        K and V that this layer holds, dequantised.
        """
        if of_latent(self.scales):
            return self._update_latent(key_states, value_states)
        return self._update(key_states, value_states)

    def _update_latent(self, latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Store the latent [B, 1, T, R] and k_pe [B, 1, T, P]; returns all that is held of both."""
        row, rank = torch.cat([latent, k_pe], -1), latent.shape[-1]
        if row.shape[-1] % 2:
            raise AttentionError(f"a latent and k_pe of {row.shape[-1]} values: must be even")
        halves = row.chunk(2, -1)
        held = torch.cat(self._update(*halves), -1).to(latent.dtype)
        return held[..., :rank], held[..., rank:]

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._length += key_states.shape[2]
        self.batch.check_held(len(key_states), self._length)
        sequences, slots = self.batch.where(key_states.device)
        append_kv = _append(self.batch.use_triton)
        k_dim, v_dim = key_states.shape[3], value_states.shape[3]
        self.values_per_token = key_states.shape[1] * (k_dim + v_dim)
        new = (_filled(_tokens(x), self.blocks.head_dim, 0.0) for x in (key_states, value_states))
        append_kv(*new, self.blocks, slots)
        if self.batch.use_triton:
            key_states.fp8kv_layer = self  # type: ignore[attr-defined]
            return key_states, value_states
        dense = ops.dense if torch.compiler.is_compiling() else KVBlocks.dense
        key, value = dense(self.blocks, sequences.block_tables, self._length)
        key, value = key[..., :k_dim], value[..., :v_dim]
        if self._restore:
            return key.to(key_states.dtype), value.to(value_states.dtype)
        return key, value

    def get_seq_length(self) -> int:
        """Tokens per row, padding included."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the mask has to cover."""
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, a number that is 0 or negative."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes 0 or minus the tokens to remove, got {tokens_to_remove}")
        self._length = max(0, self._length + tokens_to_remove)
        if self._leads:
            self.batch.truncate(self._length)

    def reset(self) -> None:
        """Forget all tokens."""
        self.crop(-self._length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes row `beam_idx[i]`."""
        if self._leads:
            self.batch.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        if self._leads:
            self.batch.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self.reorder_cache(indices)

    def offload(self) -> None:
        """FP8 blocks stay where they are."""

    def prefetch(self) -> None:
        """FP8 blocks stay where they are."""


class Fp8IndexedLayer(Fp8CacheLayer):
    """The same for sparse attention: keys of its indexer, [B, T, D], lie beside it as they are."""

    indexer_keys: Tensor | None = None

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Store the indexer's keys [B, T, D]; returns all of them."""
        held = self.indexer_keys
        self.indexer_keys = keys if held is None else torch.cat([held, keys], 1)
        return self.indexer_keys

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, a number that is 0 or negative."""
        super().crop(tokens_to_remove)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : self._length]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes row `beam_idx[i]`."""
        super().reorder_cache(beam_idx)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[beam_idx.to(self.indexer_keys.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys.repeat_interleave(repeats, 0)


class Fp8HybridLayer(Fp8CacheLayer, LinearAttentionLayer):  # type: ignore[misc]
    """The same beside the states of Mamba or a convolution, which lie there as they are."""

    is_croppable = False  # states cannot be taken back

    def take_over(self, layer: Any) -> None:
        """Hold as many states as the layer that it stands in for."""
        LinearAttentionLayer.__init__(self, number_of_states=layer.number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make the blocks for K and V, given by position, or a state, given by name."""
        of = LinearAttentionLayer if kwargs else Fp8CacheLayer
        of.lazy_initialization(self, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, if the states record them."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        LinearAttentionLayer.reset(self)
        super().crop(-self._length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes row `beam_idx[i]`."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                states[index] = None if state is None else state.repeat_interleave(repeats, 0)


# what stands in for a layer of a transformers cache
STAND_INS: dict[type, type[Fp8CacheLayer]] = {
    DynamicLayer: Fp8CacheLayer,
    DynamicSlidingWindowLayer: Fp8CacheLayer,
    DynamicIndexedLayer: Fp8IndexedLayer,
    LinearAttentionAndFullAttentionLayer: Fp8HybridLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: Fp8HybridLayer,
}


def put_stand_in(
    cache: Cache, layer_idx: int, batch: CacheRows, scales: ModuleScales, *, leads: bool, restore: bool
) -> None:
    """Put an FP8 layer in the place of an empty layer of a transformers cache.

    Raises:
        AttentionError: there is no such layer, or none is known for its kind, or it holds tokens.
    """
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if layer is None or type(layer) not in STAND_INS:
        raise AttentionError(
            f"layer {layer_idx} of the cache is {type(layer).__name__}; give generate a "
            "DynamicCache, or no cache at all"
        )
    if layer.get_seq_length() > 0:
        raise AttentionError(
            "the cache holds 16-bit K and V already; start with an empty one inside the block"
        )
    stand_in = STAND_INS[type(layer)](batch, scales, leads=leads, restore=restore)
    stand_in.take_over(layer)
    cache.layers[layer_idx] = stand_in


def values_per_token(cache: Cache) -> int:
    """Values of K and V of one token, over all FP8 layers, without what fills up heads."""
    return sum(x.values_per_token for x in cache.layers if isinstance(x, Fp8CacheLayer))


def layer_of(key: Tensor) -> Fp8CacheLayer | None:
    """The layer that `update` marked these keys with."""
    return getattr(key, "fp8kv_layer", None)


def paged_cache(cache: Cache) -> PagedKVCache:
    """The FP8 blocks behind a transformers cache that was filled inside `fp8_attention`.

    Raises:
        ValueError: there are none.
    """
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, Fp8CacheLayer) and layer.batch.cache is not None:
            return layer.batch.cache
    raise ValueError("this cache holds no FP8 blocks: it was not filled inside fp8_attention")


def _tokens(x: Tensor) -> Tensor:
    """[B, K, T, D] as [B * T, K, D]."""
    return x[:, :, 0] if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)


def _filled(x: Tensor, size: int, value: float) -> Tensor:
    """Channels [..., D] filled up to `size`; scales that are none of channels as they are."""
    missing = size - x.shape[-1] if x.dim() > 1 else 0
    return pad(x, (0, missing), value=value) if missing else x


def _append(use_triton: bool) -> Callable[..., None]:
    if torch.compiler.is_compiling():
        return functools.partial(ops.append_kv, use_triton=use_triton)
    if use_triton:
        from fp8kv_runtime.kernels.append_kv import append_kv

        return append_kv
    return reference.append_kv
