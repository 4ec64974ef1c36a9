"""Engines' attention kernels that `--attention` simulates: what they take, and how they round."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.caches.types import Shape
from calib.capture.capabilities import check_queries, engine_class
from calib.choices import AttentionMode
from calib.engines.catalogue import Kernel, find_engine
from calib.errors import InputError
from calib.evaluate.engine_attention import HopperAdds, fa3_attention, vllm_triton_attention
from calib.scales.scales import KVScales
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.fp8 import FP8_DTYPES
from fp8kv_runtime.hf.swap import EngineQuery, Replacement
from fp8kv_runtime.options import AttentionOptions

_STRATEGIES = {"tensor": "tensor", "attn_head": "KV head", "channel": "channel"}
_TILES_BETWEEN_ADDS: Mapping[AttentionMode, int | None] = {"fa3_two_level": 1, "fa3_one_level": None}
_HIDDEN = torch.finfo(torch.float16).min / 2  # a mask of float16 may come as float32


def check_model(mode: AttentionMode, model: PreTrainedModel, shapes: Sequence[Shape]) -> None:
    """Refuse a model that the engine's kernel does not take, with an InputError."""
    if mode == "exact":
        return
    kernel = find_engine("vllm").kernels[mode]
    if problem := _model_problem(kernel, model, shapes):
        raise InputError(f"--attention {mode}: {problem}; leave --attention out")
    # in 16 bits a query rounds alike whether or not it was multiplied by the softmax scale
    if kernel.queries == "fp8":
        check_queries(engine_class(model.config, type(model).__name__), f"--attention {mode}")


def _model_problem(kernel: Kernel, model: PreTrainedModel, shapes: Sequence[Shape]) -> str | None:
    """Return why the kernel cannot be simulated for the model."""
    if any(shape.attention != "heads" for shape in shapes):
        return "this model caches latents (MLA), whose kernels are not simulated"
    sizes = {size for shape in shapes for size in (shape.k, shape.v)}
    wrong = sorted(size for size in sizes if size not in kernel.head_sizes)
    if wrong or any(shape.k != shape.v for shape in shapes):
        words = f"head size {wrong[0]}" if wrong else f"K and V of sizes {sorted(sizes)}"
        allowed = f"K and V of one head size, {kernel.head_sizes}"
        return f"{kernel.name} is simulated for {allowed}; this model has {words}"
    if not model.get_decoder()._can_set_attn_implementation():
        return f"{type(model).__name__} calls attention itself, which cannot be replaced"
    return None


def scales_problem(mode: AttentionMode, scales: KVScales) -> str | None:
    """Return what the engine's kernel does not take of such scales."""
    kernel = find_engine("vllm").kernels[mode]
    if scales.has_center:
        return f"a mean subtracted from K, which {kernel.name} does not add"
    if scales.strategy not in kernel.strategies:
        allowed = " or ".join(_STRATEGIES[strategy] for strategy in kernel.strategies)
        return f"one scale per {_STRATEGIES[scales.strategy]}, and {kernel.name} takes one per {allowed}"
    if scales.fp8_dtype not in kernel.fp8_types:
        return f"{scales.fp8_dtype} codes, and {kernel.name} takes {' or '.join(kernel.fp8_types)}"
    return None


def simulate_attention(
    mode: AttentionMode, scales: KVScales, *, with_queries: bool, dtype: torch.dtype
) -> Replacement:
    """Return attention for `swap_attention`, given K and V as restored from an FP8 cache with `scales`.

    Layers without scales keep the model's own. `with_queries`: engines load query scales; without,
    queries in FP8 have scale 1.0. `dtype` is that of the model; engines have bfloat16 for float32.
    What is returned raises an AttentionError for a model that adds a bias to scores.
    """
    layers = {layer.layer_idx: layer for layer in scales.expand_shared().values()}
    own_dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    kernels: Mapping[AttentionMode, Callable[..., Tensor]] = {
        "fa3": fa3_attention,
        "vllm_triton": partial(vllm_triton_attention, dtype=own_dtype),
        "vllm_triton_fp8": partial(vllm_triton_attention, dtype=None, fp8=FP8_DTYPES[scales.fp8_dtype]),
    }

    def attend(
        original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        layer = layers.get(module.layer_idx)
        if layer is None:
            return original(module, query, key, value, *args, **kw)
        mask = args[0] if args else kw.get("attention_mask")
        visible = _visible_keys(mask, query.shape[2], key.shape[2]).to(query.device)
        if kw.get("position_bias") is not None:
            raise AttentionError("this model adds a bias to scores: use --attention exact")
        engine_query = EngineQuery.of(module, query.float(), kw.get("scaling"))
        options = AttentionOptions(
            engine_query.scaling, softcap=kw.get("softcap"), sinks=kw.get("s_aux"),
            q_scale=layer.q if with_queries else None,
        )  # fmt: skip
        kernel = kernels.get(mode)
        if kernel is None:
            adds = HopperAdds(layer.k, layer.v, _TILES_BETWEEN_ADDS[mode])
            kernel = partial(fa3_attention, adds=adds)
        out = kernel(engine_query.query, key.float(), value.float(), visible, options)
        return out.transpose(1, 2).to(query.dtype), None

    return attend


def _visible_keys(mask: Tensor | None, tokens: int, length: int) -> Tensor:
    """Return [B or 1, 1, T, N] bool, of a model's mask or, without one, causal."""
    if mask is None and tokens in (1, length):
        rows = torch.arange(length - tokens, length)[:, None]
        return (torch.arange(length) <= rows)[None, None]
    if mask is None or mask.dim() != 4:
        raise AttentionError(
            "engines' attention is simulated with masks for every query and key, which this model "
            "was not given; use --attention exact"
        )
    mask = mask[..., :length]
    if mask.dtype == torch.bool:
        return mask
    visible = mask > _HIDDEN
    if (mask[visible] != 0).any():
        raise AttentionError("this model adds a bias to scores: use --attention exact")
    return visible
