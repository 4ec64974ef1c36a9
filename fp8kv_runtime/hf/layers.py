"""One attention layer of a transformers cache, stored in FP8 blocks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from fp8kv_runtime import ops, reference
from fp8kv_runtime.cache import PagedKVCache
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf.batch import Batch
from fp8kv_runtime.hf.given import LayerScales, for_heads, of_latent
from fp8kv_runtime.storage import KVBlocks


class Fp8CacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer of a transformers cache, in FP8 blocks.

    A token's latent and k_pe, which have one scale, lie there as one row, in two halves.
    """

    is_sliding = False  # windows are the attention's business; every token is kept
    is_croppable = True
    is_initialized: bool

    def __init__(self, batch: Batch, scales: LayerScales, *, leads: bool, restore: bool) -> None:
        super().__init__()
        self.batch = batch
        self.scales = scales
        self._leads = leads
        self._restore = restore  # whether `update` returns everything, in the model's dtype
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the blocks, whose shape is that of the first keys [B, K, T, D]."""
        self.make_blocks(key_states.shape[1], key_states.shape[3], key_states.device)

    def make_blocks(self, num_heads: int, head_dim: int, device: torch.device) -> None:
        """Make the blocks, if there are none yet."""
        if self.is_initialized:
            return
        cache, center = self.batch.cache, self.scales.k_center
        assert cache is not None
        # a later forward pass may run outside inference mode
        with torch.inference_mode(False):
            new = KVBlocks.empty(
                cache.num_blocks,
                cache.block_size,
                num_kv_heads=num_heads,
                head_dim=head_dim,
                k_scale=for_heads(self.scales.k, num_heads),
                v_scale=for_heads(self.scales.v, num_heads),
                k_center=None if center is None else for_heads(center, num_heads),
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
        append_kv(_tokens(key_states), _tokens(value_states), self.blocks, slots)
        if self.batch.use_triton:
            key_states.fp8kv_layer = self  # type: ignore[attr-defined]
            return key_states, value_states
        dense = ops.dense if torch.compiler.is_compiling() else KVBlocks.dense
        key, value = dense(self.blocks, sequences.block_tables, self._length)
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


# what stands in for a layer of a transformers cache
STAND_INS: dict[type, type[Fp8CacheLayer]] = {
    DynamicLayer: Fp8CacheLayer,
    DynamicSlidingWindowLayer: Fp8CacheLayer,
    DynamicIndexedLayer: Fp8IndexedLayer,
}


def stand_in_for(cache: Cache, layer_idx: int) -> type[Fp8CacheLayer]:
    """What takes the place of an empty layer of a transformers cache.

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
    return STAND_INS[type(layer)]


def layer_of(key: Tensor) -> Fp8CacheLayer | None:
    """The layer that `update` marked these keys with."""
    return getattr(key, "fp8kv_layer", None)


def paged_cache(cache: Cache) -> PagedKVCache:
    """The FP8 blocks behind a transformers cache that was filled inside `fp8_attention`.

    Raises:
        ValueError: there are none.
    """
    for layer in cache.layers:
        if isinstance(layer, Fp8CacheLayer) and layer.batch.cache is not None:
            return layer.batch.cache
    raise ValueError("this cache holds no FP8 blocks: it was not filled inside fp8_attention")


def _tokens(x: Tensor) -> Tensor:
    """[B, K, T, D] as [B * T, K, D]."""
    return x[:, :, 0] if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)


def _append(use_triton: bool) -> Callable[..., None]:
    if torch.compiler.is_compiling():
        return functools.partial(ops.append_kv, use_triton=use_triton)
    if use_triton:
        from fp8kv_runtime.kernels.append_kv import append_kv

        return append_kv
    return reference.append_kv
