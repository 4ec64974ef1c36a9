"""A stand-in for a model's attention that rounds as an engine's kernel does."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calib.choices import AttentionMode
from calib.scales.scales import KVScales, LayerScales
from fp8kv_runtime.engine_attention import fa3_attention, vllm_triton_attention
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.fp8 import FP8_DTYPES
from fp8kv_runtime.hf.queries import EngineQuery
from fp8kv_runtime.hf.swap import Replacement
from fp8kv_runtime.options import AttentionOptions

_HIDDEN = torch.finfo(torch.float16).min / 2  # a mask of float16 may come as float32


def simulated(
    mode: AttentionMode, scales: KVScales, *, with_queries: bool, dtype: torch.dtype
) -> Replacement:
    """Attention for `swap_attention`, given K and V as restored from an FP8 cache with `scales`.

    Layers without scales keep the model's own. `with_queries`: engines load query scales; without,
    queries in FP8 have scale 1.0. `dtype` is that of the model; engines have bfloat16 for float32.
    """
    layers: Mapping[int, LayerScales] = {s.layer_idx: s for s in scales.expand_shared().values()}
    kernels: Mapping[AttentionMode, Callable[..., Tensor]] = {
        "fa3": fa3_attention,
        "vllm_triton": partial(
            vllm_triton_attention, dtype=torch.bfloat16 if dtype == torch.float32 else dtype
        ),
        "vllm_triton_fp8": partial(vllm_triton_attention, dtype=None, fp8=FP8_DTYPES[scales.fp8_dtype]),
    }

    def attend(
        original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        layer = layers.get(module.layer_idx)
        if layer is None:
            return original(module, query, key, value, *args, **kw)
        mask = args[0] if args else kw.get("attention_mask")
        visible = _visible(mask, query.shape[2], key.shape[2]).to(query.device)
        q_scale = layer.q if with_queries else None
        asked = EngineQuery.of(module, query.float(), kw.get("scaling"))
        options = AttentionOptions(
            asked.scaling, softcap=kw.get("softcap"), sinks=kw.get("s_aux"), q_scale=q_scale
        )
        _check_position_bias(kw)
        out = kernels[mode](asked.query, key.float(), value.float(), visible, options)
        return out.transpose(1, 2).to(query.dtype), None

    return attend


def _visible(mask: Tensor | None, tokens: int, length: int) -> Tensor:
    """[B or 1, 1, T, N] bool, of a model's mask or, without one, causal."""
    if mask is None and tokens in (1, length):
        rows = torch.arange(length - tokens, length)[:, None]
        return (torch.arange(length) <= rows)[None, None]
    if mask is None or mask.dim() != 4:
        raise AttentionError(
            "engines' attention is simulated with masks for every query and key, which this model "
            "was not given; use --attention exact"
        )
    mask = mask[..., :length]
    visible = mask if mask.dtype == torch.bool else mask > _HIDDEN
    if mask.dtype != torch.bool and (mask[visible] != 0).any():
        raise AttentionError("this model adds a bias to scores: use --attention exact")
    return visible


def _check_position_bias(kw: Mapping[str, Any]) -> None:
    if kw.get("position_bias") is not None:
        raise AttentionError("this model adds a bias to scores: use --attention exact")
