"""`fp8_attention`: run a model of transformers on an FP8 paged KV cache, and leave no trace."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Protocol, get_args, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel

from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize, quantize
from fp8kv_runtime.hf.graph import RecordedSteps
from fp8kv_runtime.hf.layers import (
    Fp8CacheLayer,
    ModuleScales,
    cache_argument,
    convert_cache,
    new_cache,
)
from fp8kv_runtime.hf.rows import CacheRows, is_applied
from fp8kv_runtime.hf.swap import EngineQuery, swap_attention, swap_forward
from fp8kv_runtime.options import AttentionOptions

Backend = Literal["auto", "triton", "torch"]
_OTHER_MASK = (
    "the Triton kernels apply causal masks with a sliding window and left padding; this "
    "model or input needs another one. Pad on the left, or use the torch backend"
)


@runtime_checkable
class Scales(Protocol):
    """Scales of a model by the names of its attention modules, as `calib.KVScales`."""

    @property
    def layers(self) -> Mapping[str, Any]:
        """The `ModuleScales` of each module."""

    @property
    def fp8_dtype(self) -> str:
        """The FP8 type, a key of `FP8_DTYPES`."""


@contextmanager
def fp8_attention(
    model: PreTrainedModel,
    scales: Scales,
    *,
    backend: Backend = "auto",
    quantize_query: bool = False,
    block_size: int = 64,
) -> Iterator[None]:
    """Keep K and V of `model` in FP8 inside the block, for `generate` and for plain forward passes.

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
    _check_arguments(model, scales, backend, block_size)
    session = _Session(model, scales, backend, quantize_query, block_size)
    with ExitStack() as stack:
        stack.enter_context(swap_forward(model.get_decoder(), session.run))
        if session.swaps:
            stack.enter_context(swap_attention(model, session.attend))
        yield
        session.read_masks()


def _check_arguments(model: object, scales: object, backend: str, block_size: object) -> None:
    """Refuse arguments of the wrong kind, such as a directory's name for its scales."""
    is_size = isinstance(block_size, int) and block_size > 0
    for is_right, rule, value in (
        (hasattr(model, "get_decoder"), "model must be a transformers model", model),
        (isinstance(scales, Scales), "scales must be as calib.load_scales returns them", scales),
        (backend in get_args(Backend), f"backend must be one of {', '.join(get_args(Backend))}", backend),
        (is_size, "block_size must be a whole number from 1 on", block_size),
    ):
        if not is_right:
            is_plain = isinstance(value, (str, int, float))
            raise AttentionError(f"{rule}, got {repr(value) if is_plain else type(value).__name__}")


class _Session:
    """The state of an `fp8_attention` block, and the functions that replace the model's."""

    def __init__(
        self, model: PreTrainedModel, scales: Scales, backend: Backend, quantize_query: bool, block_size: int
    ) -> None:
        self._scales: dict[int, ModuleScales] = {s.layer_idx: s for s in scales.layers.values()}
        if not self._scales:
            raise AttentionError("no layer has scales, so there is nothing to hold in FP8")
        self._quantize_query = quantize_query
        # models that bypass the attention interface are given all of K and V in their own dtype
        self.swaps = bool(model.get_decoder()._can_set_attn_implementation())
        self._use_triton = self._chooses_triton(model, backend)
        self._check_query_scales()
        self._dtype = FP8_DTYPES[scales.fp8_dtype]
        self._block_size = block_size
        self._options: dict[tuple[Any, ...], AttentionOptions] = {}
        self._unread: list[Tensor] = []
        self._moved_scales: dict[Any, list[Any]] = {}
        self._steps: WeakKeyDictionary[CacheRows, RecordedSteps] = WeakKeyDictionary()
        self._model, self._decoder = model, model.get_decoder()
        self._cache_argument = cache_argument(self._decoder)
        parameters = inspect.signature(self._decoder.forward).parameters
        self._positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

    def _chooses_triton(self, model: PreTrainedModel, backend: Backend) -> bool:
        name = type(model).__name__
        on_gpu = all(p.device.type == "cuda" for p in model.parameters())
        # scales that do not say so are of K and V
        has_latent = any(getattr(scales, "latent", False) for scales in self._scales.values())
        if backend != "triton":
            return backend == "auto" and on_gpu and self.swaps and not has_latent
        if has_latent:
            raise AttentionError(
                f"{name} caches a latent (MLA), which no Triton kernel reads; use the torch backend"
            )
        if not self.swaps:
            raise AttentionError(
                f"{name} calls attention itself and cannot be given kernels; use the torch backend"
            )
        from fp8kv_runtime.kernels.targets import can_run

        if not can_run(on_gpu):
            raise AttentionError("the Triton kernels need a GPU, or TRITON_INTERPRET=1; use torch")
        return True

    def _check_query_scales(self) -> None:
        if not self._quantize_query:
            return
        if not self.swaps:
            raise AttentionError("this model calls attention itself: its queries cannot be reached")
        for scales in self._scales.values():
            if scales.q is None or scales.q.dim() != 1 or scales.k.dim() == 2:
                raise AttentionError(
                    "FP8 queries need query scales and one K scale per tensor or head: calibrate "
                    "with --targets qkv --strategy tensor or attn_head"
                )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace the decoder's `forward`, which `torch.compile` leaves as it is."""
        names = self._positional[: len(args)]
        if len(names) == len(args):
            args, kwargs = (), dict(**dict(zip(names, args, strict=True)), **kwargs)
        if (cache := kwargs.pop("past_key_values", None)) is not None:
            kwargs[self._cache_argument] = cache
        kwargs[self._cache_argument], rows = self._prepare(args, kwargs)
        if args:
            output = forward(*args, **kwargs)
        else:
            if rows not in self._steps:
                self._steps[rows] = RecordedSteps(self._decoder)
            output = self._steps[rows].run(forward, kwargs[self._cache_argument], rows, kwargs)
        if not rows.layers or rows.layers[0].get_seq_length() != rows.length:
            raise AttentionError(
                "the model stored nothing in the FP8 cache, so its results are not those of one: turn off "
                "gradient checkpointing, or use a version of transformers that docs/install.md names"
            )
        return output

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Cache, CacheRows]:
        """Reserve a forward pass's tokens in an FP8 cache, and return it with its rows."""
        cache = kwargs.get(self._cache_argument)
        if cache is None:
            cache = new_cache(self._model)
        candidates = (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), *args[:1])
        inputs = next((each for each in candidates if each is not None), None)
        if inputs is None:
            raise AttentionError("give the model input_ids or inputs_embeds")
        if 0 in inputs.shape[:2]:
            raise AttentionError(f"the batch is empty: [rows, tokens] are {[*inputs.shape[:2]]}")
        if inputs.shape[1] > 1:
            self.read_masks()
        rows, mask = self._convert(cache, inputs.shape[0]), kwargs.get("attention_mask")
        rows.set_layers(cache.layers)
        rows.unread = self._unread
        rows.padding = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        lengths = {layer.get_seq_length() for layer in rows.layers}
        if len(rows.layers) < len(self._scales):  # the cache makes them when K and V come
            lengths.add(0)
        if len(lengths) > 1:
            raise AttentionError(
                f"the layers of this cache hold {min(lengths)} to {max(lengths)} tokens: an "
                "earlier forward pass failed half-way; go on with a new cache"
            )
        rows.truncate(lengths.pop())  # what a forward pass reserved that failed
        rows.extend(inputs.shape[1])
        return cache, rows

    def read_masks(self) -> None:
        """Check the masks of steps on a GPU, which did not wait for it."""
        if self._unread and not bool(self._unread.pop()):
            raise AttentionError(_OTHER_MASK)

    def _convert(self, cache: Cache, num_rows: int) -> CacheRows:
        """Put FP8 layers where the cache has empty 16-bit ones; return the rows they share."""
        for layer in (*cache.layers, cache.layer_class_to_replicate):
            if isinstance(rows := getattr(layer, "rows", None), CacheRows):
                return rows
        rows = CacheRows(
            num_rows, block_size=self._block_size, dtype=self._dtype, use_triton=self._use_triton,
            restore=not self.swaps, lead=min(self._scales), moved_scales=self._moved_scales,
        )  # fmt: skip
        convert_cache(cache, rows, self._scales)
        return rows

    def attend(
        self, original: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Replace the model's attention function: `query` [B, H, T, D], `key` and `value` [B, K, N, D]."""
        layer_idx = getattr(module, "layer_idx", -1)
        layer = getattr(key, "fp8kv_layer", None) if self._use_triton else None
        if layer is not None:
            mask = args[0] if args else kwargs.get("attention_mask")
            if self._quantize_query:
                engine_query = EngineQuery.of(module, query, kwargs.get("scaling"))
                query, kwargs = engine_query.query, {**kwargs, "scaling": engine_query.scaling}
            return self._attend_to_blocks(layer, query, mask, kwargs)[..., : value.shape[-1]], None
        if self._use_triton and layer_idx in self._scales:
            raise AttentionError(f"layer {layer_idx} changes K after it is cached; use the torch backend")
        if key.dtype == query.dtype and not self._quantize_query:
            return original(module, query, key, value, *args, **kwargs)
        dtype, scales = query.dtype, self._scales.get(layer_idx)
        query = query.float()
        if self._quantize_query and scales is not None and scales.q is not None:
            q_scale = scales.q.to(query.device).view(-1, 1, 1)
            engine_query = EngineQuery.of(module, query, kwargs.get("scaling"))
            codes = quantize(engine_query.query, q_scale, self._dtype)
            query = engine_query.undo(dequantize(codes, q_scale))
        # masks that are added to scores become float32, as K and V are
        args = tuple([x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args])
        for name, x in kwargs.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                kwargs[name] = x.float()
        if key.dtype != query.dtype or value.dtype != query.dtype:
            key, value = key.float(), value.float()
        out, *weights = original(module, query, key, value, *args, **kwargs)
        return out.to(dtype), *weights

    def _attend_to_blocks(
        self, layer: Fp8CacheLayer, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """Attend from [B, H, T, D] to the layer's blocks: [B, T, H, D]."""
        from fp8kv_runtime.kernels.attention import decode_attention, extend_attention

        if kwargs.get("position_bias") is not None:
            raise AttentionError("the Triton kernels have no position bias; use the torch backend")
        num_rows, num_heads, tokens, head_dim = query.shape
        if head_dim < layer.blocks.head_dim:  # heads of V are wider, and K's filled up
            kwargs = {**kwargs, "scaling": kwargs.get("scaling") or head_dim**-0.5}
            query = pad(query, (0, layer.blocks.head_dim - head_dim))
            head_dim = layer.blocks.head_dim
        sequences, _ = layer.rows.locate(query.device)
        if mask is not None and not layer.rows.is_recorded:
            _check_mask_once(layer.rows, mask, tokens, sequences.seq_starts, kwargs.get("sliding_window"))
        options = self._options_of(layer, kwargs, query.device)
        if tokens == 1:
            return decode_attention(query[:, :, 0], layer.blocks, sequences, options)[:, None]
        packed = query.transpose(1, 2).reshape(num_rows * tokens, num_heads, head_dim)
        ends = torch.arange(num_rows + 1, dtype=torch.int32, device=query.device) * tokens
        out = extend_attention(packed, layer.blocks, sequences, ends, tokens, options)
        return out.view(num_rows, tokens, num_heads, head_dim)

    def _options_of(
        self, layer: Fp8CacheLayer, kwargs: Mapping[str, Any], device: torch.device
    ) -> AttentionOptions:
        """Return a layer's options, made once where they hold no tensor that may change."""
        scale, window = kwargs.get("scaling"), kwargs.get("sliding_window")
        softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
        key = (layer.scales.layer_idx, scale, window, softcap, sinks is None, device)
        if key not in self._options or sinks is not None:
            q_scale = layer.scales.q if self._quantize_query else None
            options = AttentionOptions(scale, window, softcap, sinks, q_scale)
            self._options[key] = options.to(device)
        return self._options[key]


def _check_mask_once(
    rows: CacheRows, mask: Tensor, num_tokens: int, starts: Tensor | None, window: int | None
) -> None:
    """Call `check_mask` once for each mask of a forward pass: layers of a type share the object."""
    if not any(mask is checked and window == size for checked, size in rows.checked_masks):
        if num_tokens == 1 and rows.defers(mask):
            rows.note(is_applied(mask, num_tokens, starts, window))
        else:
            check_mask(mask, num_tokens, starts, window)
        rows.checked_masks.append((mask, window))


def check_mask(mask: Tensor, num_tokens: int, starts: Tensor | None, window: int | None) -> None:
    """Check that a model's mask, [B, N] or [B, 1, T, N], is the one the kernels apply, see `is_applied`.

    `starts`, [B], are the first tokens that are not padding. The mask differs for packed sequences, images
    or right padding: an AttentionError.
    """
    if not bool(is_applied(mask, num_tokens, starts, window)):
        raise AttentionError(_OTHER_MASK)
