"""`fp8_attention`: run a model of transformers on an FP8 paged KV cache, and leave no trace."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PreTrainedModel

from fp8kv_runtime import ops
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize, quantize
from fp8kv_runtime.hf.batch import CacheRows
from fp8kv_runtime.hf.given import ModuleScales, Scales, of_latent
from fp8kv_runtime.hf.layers import Fp8CacheLayer, layer_of, paged_cache, put_stand_in
from fp8kv_runtime.hf.queries import EngineQuery
from fp8kv_runtime.hf.swap import swap_attention, swap_forward
from fp8kv_runtime.options import AttentionOptions

Backend = Literal["auto", "triton", "torch"]


@contextmanager
def fp8_attention(
    model: PreTrainedModel,
    scales: Scales,
    *,
    backend: Backend = "auto",
    quantize_query: bool = False,
    block_size: int = 64,
) -> Iterator[None]:
    """Inside the block `model` keeps K and V in FP8, for `generate` and for plain forward passes.

    Every forward pass reads what the cache holds, also for the tokens that it has just stored, as
    engines do. Layers without scales keep K and V as they are.

    Args:
        model: a decoder of transformers.
        scales: scales per attention module, such as `calib.load_scales(directory)`.
        backend: `triton` runs the kernels, `torch` attends to dequantised K and V with the model's
            own attention function; `auto` takes Triton on a GPU.
        quantize_query: round queries to FP8 as well, with their own scales.
        block_size: tokens per block of the cache.

    Raises:
        AttentionError: the model or the scales do not fit the backend, or it is in a block already.
    """
    session = _Session(model, scales, backend, quantize_query, block_size)
    with ExitStack() as stack:
        stack.enter_context(swap_forward(model.get_decoder(), session.run))
        if session.swaps:
            stack.enter_context(swap_attention(model, session.attend))
        yield


class _Session:
    """One `fp8_attention` block."""

    def __init__(
        self, model: PreTrainedModel, scales: Scales, backend: Backend, quantize_query: bool,
        block_size: int,
    ) -> None:  # fmt: skip
        _check(model, scales, backend, block_size)
        layers: list[ModuleScales] = list(scales.layers.values())
        if not layers:
            raise AttentionError("no layer has scales, so there is nothing to hold in FP8")
        self._scales = {layer.layer_idx: layer for layer in layers}
        self._config = model.config
        self._dtype = FP8_DTYPES[scales.fp8_dtype]
        self._quantize_query = quantize_query
        self._block_size = block_size
        # models that bypass the attention interface are given all of K and V in their own dtype
        self.swaps = bool(model.get_decoder()._can_set_attn_implementation())
        latent = any(map(of_latent, layers))
        self._use_triton = _use_triton(model, backend, self.swaps, latent)
        self._options: dict[tuple[Any, ...], AttentionOptions] = {}
        self._shapes: dict[int, tuple[int, int, torch.device]] = {}  # heads, head_dim and where
        self._check_query_scales()
        parameters = inspect.signature(model.get_decoder().forward).parameters.values()
        self._positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand in for the decoder's `forward`; the graph of `torch.compile` breaks once, here."""
        names = self._positional[: len(args)]
        if len(names) == len(args) and not any(name in kwargs for name in names):
            args, kwargs = (), {**dict(zip(names, args, strict=True)), **kwargs}
        cache, made = self._prepare(args, kwargs)
        kwargs = {**kwargs, "past_key_values": cache}
        return forward(*args, **kwargs) if made else self._first(forward, cache, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Cache, bool]:
        """Reserve a forward pass's tokens in a cache of ours; whether all its blocks are there."""
        cache = kwargs.get("past_key_values")
        if cache is None:
            cache = DynamicCache(config=self._config)
        batch = self._convert(cache)
        mask = kwargs.get("attention_mask")
        is_padding = isinstance(mask, Tensor) and mask.dim() == 2
        batch.padding = mask if is_padding else None
        given = (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), *args[:1])
        inputs = next((each for each in given if each is not None), None)
        if inputs is None:
            raise AttentionError("give the model input_ids or inputs_embeds")
        batch.truncate(self._held(cache))  # what a forward pass reserved that failed
        batch.extend(*inputs.shape[:2])
        for layer_idx, (num_heads, head_dim, device) in self._shapes.items():
            cache.layers[layer_idx].make_blocks(num_heads, head_dim, device)
            batch.where(device)
        return cache, bool(self._shapes)

    def _held(self, cache: Cache) -> int:
        """Tokens that every layer of ours holds."""
        lengths = {cache.layers[layer_idx].get_seq_length() for layer_idx in self._scales}
        if len(lengths) > 1:
            raise AttentionError(
                f"the layers of this cache hold {min(lengths)} to {max(lengths)} tokens: an "
                "earlier forward pass failed half-way; go on with a new cache"
            )
        return int(lengths.pop())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _first(self, forward: Callable[..., Any], cache: Cache, args: Any, kwargs: dict[str, Any]) -> Any:
        """The first forward pass, which tells the shapes of K and V."""
        out = forward(*args, **kwargs)
        self._shapes = {
            layer_idx: (layer.num_kv_heads, layer.head_dim, layer.codes.device)
            for layer_idx, layer in paged_cache(cache).layers.items()
        }
        return out

    def attend(
        self, original: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor,
        value: Tensor, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Stand in for the model's attention function."""
        layer = layer_of(key) if self._use_triton else None
        if layer is not None:
            mask = args[0] if args else kwargs.get("attention_mask")
            if self._quantize_query:
                asked = EngineQuery.of(module, query, kwargs.get("scaling"))
                query, kwargs = asked.query, {**kwargs, "scaling": asked.scaling}
            return self._attend_paged(layer, query, mask, kwargs)[..., : value.shape[-1]], None
        layer_idx = getattr(module, "layer_idx", None)
        if self._use_triton and layer_idx in self._scales:
            raise AttentionError(f"layer {layer_idx} changes K after it is cached; use the torch backend")
        if key.dtype == query.dtype and not self._quantize_query:
            return original(module, query, key, value, *args, **kwargs)
        return self._attend_restored(original, module, query, key, value, *args, **kwargs)

    def _attend_restored(
        self, original: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor,
        value: Tensor, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        dtype, scales = query.dtype, self._scales.get(getattr(module, "layer_idx", -1))
        query = query.float()
        if self._quantize_query and scales is not None and scales.q is not None:
            q_scale = scales.q.to(query.device).view(-1, 1, 1)
            asked = EngineQuery.of(module, query, kwargs.get("scaling"))
            query = asked.undo(dequantize(quantize(asked.query, q_scale, self._dtype), q_scale))
        args = tuple(map(_as_float32, args))
        kwargs = {name: _as_float32(each) for name, each in kwargs.items()}
        out, *rest = original(module, query, key.float(), value.float(), *args, **kwargs)
        return out.to(dtype), *rest

    def _attend_paged(
        self, layer: Fp8CacheLayer, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """[B, H, T, D] against the layer's blocks: [B, T, H, D]."""
        decode_attention, extend_attention = ops.attention_functions()
        if kwargs.get("position_bias") is not None:
            raise AttentionError("the Triton kernels have no position bias; use the torch backend")
        rows, num_heads, tokens, head_dim = query.shape
        if head_dim < layer.blocks.head_dim:  # heads of V are wider, and K's filled up
            kwargs = {**kwargs, "scaling": kwargs.get("scaling") or head_dim**-0.5}
            head_dim = layer.blocks.head_dim
            query = pad(query, (0, head_dim - query.shape[-1]))
        sequences, _ = layer.batch.where(query.device)
        window = kwargs.get("sliding_window")
        if mask is not None:
            layer.batch.check_once(mask, tokens, sequences, window)
        options = self._options_of(layer, kwargs, query.device)
        if tokens == 1:
            return decode_attention(query[:, :, 0], layer.blocks, sequences, options)[:, None]
        packed = query.transpose(1, 2).reshape(rows * tokens, num_heads, head_dim)
        ends = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * tokens
        out = extend_attention(packed, layer.blocks, sequences, ends, tokens, options)
        return out.view(rows, tokens, num_heads, head_dim)

    def _options_of(
        self, layer: Fp8CacheLayer, kwargs: dict[str, Any], device: torch.device
    ) -> AttentionOptions:
        """A layer's options; made once where they hold no tensor that may change."""
        scale, window = kwargs.get("scaling"), kwargs.get("sliding_window")
        softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
        key = (layer.scales.layer_idx, scale, window, softcap, sinks is None, device)
        if key not in self._options or sinks is not None:
            q_scale = layer.scales.q if self._quantize_query else None
            options = AttentionOptions(scale, window, softcap, sinks, q_scale)
            self._options[key] = options.to(device)
        return self._options[key]

    def _convert(self, cache: Cache) -> CacheRows:
        """Put FP8 layers where the cache has empty 16-bit ones; return the rows they share."""
        for layer in cache.layers:
            if isinstance(layer, Fp8CacheLayer):
                return layer.batch
        while cache.layer_class_to_replicate is not None and len(cache.layers) <= max(self._scales):
            cache.layers.append(cache.layer_class_to_replicate())
        batch = CacheRows(block_size=self._block_size, dtype=self._dtype, use_triton=self._use_triton)
        lead = min(self._scales)
        for layer_idx, scales in self._scales.items():
            leads, restore = layer_idx == lead, not self.swaps
            put_stand_in(cache, layer_idx, batch, scales, leads=leads, restore=restore)
        return batch

    def _check_query_scales(self) -> None:
        if not self._quantize_query:
            return
        if not self.swaps:
            raise AttentionError("this model calls attention itself: its queries cannot be reached")
        for layer in self._scales.values():
            if layer.q is None or layer.q.dim() != 1 or layer.k.dim() == 2:
                raise AttentionError(
                    "FP8 queries need query scales and one K scale per tensor or head: calibrate "
                    "with --targets qkv --strategy tensor or attn_head"
                )


def _check(model: object, scales: object, backend: str, block_size: int) -> None:
    """Refuse what is none of the four, such as a directory's name for its scales."""
    backends = get_args(Backend)
    for right, wanted, got in (
        (hasattr(model, "get_decoder"), "model must be a transformers model", model),
        (isinstance(scales, Scales), "scales must be as calib.load_scales returns them", scales),
        (backend in backends, f"backend must be one of {', '.join(backends)}", backend),
        (
            isinstance(block_size, int) and block_size > 0,
            "block_size must be a whole number from 1 on",
            block_size,
        ),
    ):
        if not right:
            plain = isinstance(got, (str, int, float))
            raise AttentionError(f"{wanted}, got {repr(got) if plain else type(got).__name__}")


def _use_triton(model: PreTrainedModel, backend: Backend, swaps: bool, latent: bool) -> bool:
    on_gpu = all(p.device.type == "cuda" for p in model.parameters())
    if backend != "triton":
        return backend == "auto" and on_gpu and swaps and not latent
    if latent:
        raise AttentionError(
            f"{type(model).__name__} caches a latent (MLA), for which there is no Triton kernel; "
            "use the torch backend"
        )
    if not swaps:
        raise AttentionError(
            f"{type(model).__name__} calls attention itself and cannot be given kernels; "
            "use the torch backend"
        )
    from fp8kv_runtime.kernels.targets import can_run

    if not can_run(on_gpu):
        raise AttentionError("the Triton kernels need a GPU, or TRITON_INTERPRET=1; use torch")
    return True


def _as_float32(argument: Any) -> Any:
    is_mask = isinstance(argument, Tensor) and argument.is_floating_point()
    return argument.float() if is_mask else argument
