"""A transformers cache in FP8: its layers as `KVBlocks`, beside the rows that they share."""

import inspect
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from fp8kv_runtime.cache import PagedKVCache
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.fp8 import fp8_max
from fp8kv_runtime.hf.rows import CacheRows
from fp8kv_runtime.storage import KVBlocks, move_scale, version

_ROOM = 256  # tokens: a short prompt, and the least room of decoded K and V beside those that are there


class ModuleScales(Protocol):
    """Scales of one attention module, as `calib` derives them; float32."""

    layer_idx: int
    k: Tensor  # [1], [K] or [K, D]
    v: Tensor  # [1], [K] or [K, D]
    q: Tensor | None  # [1] or [H], for FP8 queries
    k_center: Tensor | None  # [K, D], subtracted from K


class StepTokens:
    """The places of the rows' next tokens in blocks, and memory for their K and V, one layer at a time.

    `shape` is that of K and V, [B, K, T, D]. The tokens go to `block_ids` [B, T], to the places `offsets`
    [B, T] in these blocks; both are int64.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, block_ids: Tensor, offsets: Tensor
    ) -> None:
        self.shape = shape
        self.scaled = torch.empty((2, *shape))
        self.key, self.value = self.scaled
        self.codes = torch.empty((2, *shape), dtype=dtype)
        # numpy takes less time to begin than torch
        self.bytes = self.codes.view(torch.uint8).permute(1, 3, 0, 2, 4).numpy()
        place = block_ids.numpy(), offsets.numpy()
        self.place = (place[0].item(), place[1].item()) if block_ids.numel() == 1 else place
        self.limit = fp8_max(dtype)


class LayerStep:
    """Storing and reading one layer's next tokens on a CPU, where all before them are decoded already.

    It is prepared for all layers before a forward pass: a model's weights fill the processor's caches, so an
    operation between two layers takes several times as long as one of many in a row.

    `decoded` [2, B, K, n, D] float32 has room for these: n is at least `length`, which counts them.
    """

    def __init__(self, blocks: KVBlocks, decoded: Tensor, length: int, tokens: StepTokens) -> None:
        self.tokens = tokens
        self.scales = blocks.scales
        self.stored = blocks.token_bytes.numpy()
        num_tokens = tokens.shape[2]
        self.new = decoded.narrow(3, length - num_tokens, num_tokens)
        self.key, self.value = decoded.narrow(3, 0, length).unbind(0)

    def run(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the next K and V [B, K, T, D]; return all [B, K, N, D].

        They are what `KVBlocks.encode`, `write` and `decode` make of them.
        """
        tokens = self.tokens
        tokens.key.copy_(key)
        tokens.value.copy_(value)
        tokens.codes.copy_(tokens.scaled.div_(self.scales).clamp_(-tokens.limit, tokens.limit))
        self.stored[tokens.place] = tokens.bytes
        self.new.copy_(tokens.codes).mul_(self.scales)
        return self.key, self.value


class Fp8CacheLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a transformers cache, in FP8 blocks; it replaces the empty `layer`.

    A token's latent and k_pe, which have one scale, lie there as one row, in two halves. Where
    heads of K and of V differ in size, the smaller ones are filled up with zeros. Every token is
    kept: sliding windows are the attention's business.
    """

    is_initialized: bool

    def __init__(self, layer: object, rows: CacheRows, scales: ModuleScales) -> None:
        self.__dict__.update(vars(layer))  # how many states it has, and whether it records past ones
        self.is_initialized = False
        self.rows = rows
        self.scales = scales
        self.values_per_token = 0  # of K and V, without what fills up heads
        self.length = 0  # tokens per row, padding included
        self._is_lead = scales.layer_idx == rows.lead
        self._is_latent = getattr(scales, "latent", False)  # scales that do not say so are of K and V
        # what the codes of the tokens say, [2, B, K, tokens and room for more, D]
        self._decoded: Tensor | None = None
        self._selections = -1  # of the rows, when they were last read
        self._step: LayerStep | None = None
        rows.add_layer(self)

    @property
    def blocks(self) -> KVBlocks:
        """This layer's blocks; growing the pool replaces them."""
        return self.rows.cache.layers[self.scales.layer_idx]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the blocks, whose heads are those of the first keys and values [B, K, T, D]."""
        num_heads, head_dim = key_states.shape[1], max(key_states.shape[3], value_states.shape[3])
        cache, scales, device = self.rows.cache, self.scales, key_states.device
        with torch.inference_mode(False):  # a later forward pass may run outside inference mode
            scale_tensors = (scales.k, scales.v, scales.k_center)
            key = (scales.layer_idx, num_heads, head_dim, device, *map(version, scale_tensors))
            if key not in self.rows.moved_scales:
                self.rows.moved_scales[key] = [
                    None if x is None else move_scale(_fit(x, num_heads, head_dim, fill), device)
                    for x, fill in zip(scale_tensors, (1.0, 1.0, 0.0), strict=True)
                ]
            k_scale, v_scale, k_center = self.rows.moved_scales[key]
            blocks = KVBlocks.empty(
                cache.num_blocks, cache.block_size, num_kv_heads=num_heads, head_dim=head_dim,
                k_scale=k_scale, v_scale=v_scale, k_center=k_center, dtype=self.rows.dtype, device=device,
            )  # fmt: skip
        cache.add_layer(scales.layer_idx, blocks)
        self.values_per_token = num_heads * (key_states.shape[3] + value_states.shape[3])
        self.keys = self.values = key_states.new_empty(0)  # Mllama looks whether there are any
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store K and V [B, K, T, D], or latent and k_pe; return what the attention function is to get.

        With the Triton kernels that is K and V as they came, marked with this layer; else all of
        K and V that this layer holds, dequantised: [B, K, N, D].
        """
        if not self._is_latent:
            return self._update(key_states, value_states)
        token, rank = torch.cat([key_states, value_states], -1), key_states.shape[-1]
        if token.shape[-1] % 2:
            raise AttentionError(
                f"a latent and k_pe must have an even number of values, got {token.shape[-1]}"
            )
        tokens = torch.cat(self._update(*token.chunk(2, -1)), -1)
        return tokens[..., :rank], tokens[..., rank:]

    def prepare(self, shared: dict[Any, StepTokens]) -> None:
        """Prepare the pass that the rows have reserved tokens for, if it may only decode these."""
        self._step, rows, decoded = None, self.rows, self._decoded
        if decoded is None or decoded.shape[3] < rows.length or self._selections != rows.selections:
            return
        blocks, shape = self.blocks, (*decoded.shape[1:3], rows.length - self.length, decoded.shape[4])
        if blocks.k_center is None:
            if shape not in shared:
                shared[shape] = StepTokens(shape, blocks.codes.dtype, *rows.places(decoded.device))
            self._step = LayerStep(blocks, decoded, rows.length, shared[shape])

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        step, self._step = self._step, None
        fits = step is not None and key_states.shape == value_states.shape == step.tokens.shape
        if (has_grad := torch.is_grad_enabled()) or step is None or not fits:
            with torch.no_grad():
                return self._store(key_states, value_states, may_keep=not has_grad)
        self.length = self.rows.length
        return step.run(key_states, value_states)

    def _store(self, key_states: Tensor, value_states: Tensor, *, may_keep: bool) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, blocks, device = self.rows, self.blocks, key_states.device
        self.length += key_states.shape[2]
        rows.check_size(len(key_states), self.length)
        k_dim, v_dim = key_states.shape[3], value_states.shape[3]
        key, value = (_pad_channels(x, blocks.head_dim, 0.0) for x in (key_states, value_states))
        if rows.use_triton:
            from fp8kv_runtime.kernels.append_kv import append_kv

            append_kv(_flatten(key), _flatten(value), blocks, rows.locate(device)[1])
            key_states.fp8kv_layer = self  # type: ignore[attr-defined]
            return key_states, value_states
        tokens = torch.stack([key, value])
        codes = blocks.encode(tokens)
        blocks.write(codes, *rows.places(device))
        dtype = tokens.dtype if rows.restore or self._is_latent else torch.float32
        key, value = self._read(codes, dtype, may_keep=may_keep and device.type == "cpu")
        return key[..., :k_dim], value[..., :v_dim]

    def _read(self, codes: Tensor, dtype: torch.dtype, *, may_keep: bool) -> Tensor:
        """Return K and V [2, B, K, N, D] of all tokens, whose newest have these codes [2, B, K, T, D].

        On a CPU they are kept, those of a long prompt from the second pass over the same rows on, so that
        the next decodes its own tokens only. What is kept lies before `length`: `crop` leaves it right.
        """
        rows, length, num_tokens = self.rows, self.length, codes.shape[3]
        keep = may_keep and (self._selections == rows.selections or length == num_tokens <= _ROOM)
        self._selections = rows.selections
        if keep and self._decoded is not None and self._decoded.shape[3] >= length:
            self._decoded.narrow(3, length - num_tokens, num_tokens).copy_(self.blocks.decode(codes))
            return self._decoded.narrow(3, 0, length)
        tables = rows.locate(codes.device)[0].block_tables
        dense = self.blocks.dense(tables, length).to(dtype)
        self._decoded = None
        if keep:
            with torch.inference_mode(False):  # or it could not be written outside inference mode
                size = length + max(length, _ROOM)
                self._decoded = dense.new_empty((*dense.shape[:3], size, dense.shape[4]))
            self._decoded.narrow(3, 0, length).copy_(dense)
        return dense

    def get_seq_length(self) -> int:
        """Return the tokens per row, padding included."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, a number that is 0 or negative; else a ValueError."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes 0 or minus the tokens to remove, got {tokens_to_remove}")
        self.length = max(0, self.length + tokens_to_remove)
        if self._is_lead:
            self.rows.truncate(self.length)

    def reset(self) -> None:
        """Forget all tokens."""
        self.crop(-self.length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row `i` a copy of row `beam_idx[i]`, [B] int32 or int64."""
        if self._is_lead:
            self.rows.select(beam_idx.tolist())

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, one copy after the other."""
        if self._is_lead:
            self.rows.select([row for row in range(self.rows.num_rows) for _ in range(repeats)])

    def offload(self) -> None:
        """Leave the FP8 blocks where they are."""

    prefetch = offload


class Fp8HybridLayer(Fp8CacheLayer, LinearAttentionLayer):  # type: ignore[misc]
    """An `Fp8CacheLayer` beside the states of Mamba or a convolution, which lie there as they are."""

    is_croppable = False  # states cannot be taken back

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make the blocks for K and V [B, K, T, D], two arguments, or a state, an argument with a name."""
        kind = LinearAttentionLayer if kwargs else Fp8CacheLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, if the states record them."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        LinearAttentionLayer.reset(self)
        super().crop(-self.length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row `i` a copy of row `beam_idx[i]`, [B] int32 or int64."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        super().reorder_cache(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                states[index] = None if state is None else state.repeat_interleave(repeats, 0)


# what replaces a layer of a transformers cache
_REPLACEMENTS: dict[type, type[Fp8CacheLayer]] = {
    DynamicLayer: Fp8CacheLayer,
    DynamicSlidingWindowLayer: Fp8CacheLayer,
    LinearAttentionAndFullAttentionLayer: Fp8HybridLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: Fp8HybridLayer,
}


def _replacement(kind: type) -> type[Fp8CacheLayer] | None:
    """Return the FP8 layer for layers of this kind; None: what they hold is not known.

    A kind may keep more beside K and V, as they are: keys of an indexer, for sparse attention.
    """
    update = getattr(kind, "update", None)
    if kind not in _REPLACEMENTS and issubclass(kind, DynamicLayer) and update is DynamicLayer.update:
        own = ("__init__", "offload", "prefetch")
        members = {name: getattr(Fp8CacheLayer, name) for name in own}
        members["_layer_type"] = None  # or new caches would have this class in place of `kind`
        _REPLACEMENTS[kind] = type(f"Fp8{kind.__name__}", (kind, Fp8CacheLayer), members)
    return _REPLACEMENTS.get(kind)


def cache_argument(model: nn.Module) -> str:
    """Return the name under which `model` takes a cache, which transformers 5.24 changed."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def cache_of(output: Mapping[str, Any]) -> Any:
    """Return the cache of what a model of any version of transformers returned; None: there is none."""
    return output.get("cache", output.get("past_key_values"))


def new_cache(model: PreTrainedModel) -> Cache:
    """Return an empty cache, of the model's own class where its decoder takes no other, as MiniMax's."""
    decoder = model.get_decoder()
    parameter = inspect.signature(type(decoder).forward).parameters.get(cache_argument(decoder))
    kinds = (kind for kind in get_args(parameter and parameter.annotation) if isinstance(kind, type))
    own = next((kind for kind in kinds if issubclass(kind, DynamicCache) and kind is not DynamicCache), None)
    return own() if own else DynamicCache(config=model.config)


def convert_cache(cache: Cache, rows: CacheRows, scales: Mapping[int, ModuleScales]) -> None:
    """Put FP8 layers in the place of those empty layers of a transformers cache that have `scales`.

    An AttentionError: the cache lacks such a layer, or it is of an unknown kind, or holds tokens.
    """
    kind = cache.layer_class_to_replicate  # of layers that the cache makes when K and V come
    for layer_idx in scales:
        if layer_idx < len(cache.layers) or kind is None:
            layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
            cache.layers[layer_idx] = _fp8_layer(layer, rows, scales[layer_idx])
    if kind is not None:
        owner = weakref.ref(cache)

        def make_layer() -> Any:
            layer, own = kind(), scales.get(len(owner().layers))  # type: ignore[union-attr]
            return layer if own is None else _fp8_layer(layer, rows, own)

        vars(make_layer)["rows"] = rows
        cache.layer_class_to_replicate = make_layer


def _fp8_layer(layer: Any, rows: CacheRows, scales: ModuleScales) -> Fp8CacheLayer:
    if (replacement := _replacement(type(layer))) is None:
        raise AttentionError(
            f"layer {scales.layer_idx} of the cache is {type(layer).__name__}; give generate a "
            "DynamicCache, or no cache at all"
        )
    if layer.get_seq_length() > 0:
        raise AttentionError(
            "the cache holds 16-bit K and V already; start with an empty one inside the block"
        )
    return replacement(layer, rows, scales)


def values_per_token(cache: Cache) -> int:
    """Count the values of K and V of one token, over all FP8 layers, without what fills up heads."""
    return sum(x.values_per_token for x in cache.layers if isinstance(x, Fp8CacheLayer))


def paged_cache(cache: Cache) -> PagedKVCache:
    """Return the FP8 blocks behind a transformers cache that was filled inside `fp8_attention`.

    Raises:
        ValueError: there are none.
    """
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, Fp8CacheLayer) and layer.is_initialized:
            return layer.rows.cache
    raise ValueError("this cache holds no FP8 blocks: it was not filled inside fp8_attention")


def _flatten(x: Tensor) -> Tensor:
    """Reshape [B, K, T, D] to [B * T, K, D]."""
    return x[:, :, 0] if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)


def _fit(scale: Tensor, num_heads: int, head_dim: int, value: float) -> Tensor:
    """Repeat scales [1], [K] or [K, D] as the cache's KV heads were, and pad their channels with `value`."""
    if num_heads % scale.shape[0]:
        raise AttentionError(
            f"scales for {scale.shape[0]} KV heads do not fit a layer with {num_heads}: "
            "they are of another model"
        )
    repeats = 1 if scale.shape[0] == 1 else num_heads // scale.shape[0]
    return _pad_channels(scale.repeat_interleave(repeats, 0), head_dim, value)


def _pad_channels(x: Tensor, size: int, value: float) -> Tensor:
    """Fill channels [..., D] up to `size`; leave scales [1] or [K] as they are."""
    missing = size - x.shape[-1] if x.dim() > 1 else 0
    return pad(x, (0, missing), value=value) if missing else x
