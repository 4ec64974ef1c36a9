"""Per layer and head: what rounding does to K, V and the attention output, on held-out text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.attention import map_attention
from calib.eval.values import LayerValues, layer_values
from calib.eval.variants import Rounding, Variant, broadcast_scale, fp8_rounding
from calib.scales import KVScales, LayerScales
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max, quantize
from fp8kv_runtime.hf import swap_attention


@dataclass
class LayerError:
    """Sums over tokens, of one layer and variant; K counts KV heads, H query heads."""

    layer_idx: int
    error: Tensor  # [documents, H] squared error of the attention output
    power: Tensor  # [documents, H] squared attention output
    saturated: Tensor  # [2, K] values of K and V beyond the format's largest
    underflowed: Tensor  # [2, K] values that became 0
    values: int  # per head, of each of K and V
    amax: Tensor  # [2, K] largest |x| / scale

    @property
    def rel_rms(self) -> Tensor:
        """Relative RMS error of the attention output of each head: [H]."""
        return (self.error.sum(0) / self.power.sum(0).clamp(min=1e-30)).sqrt()


@dataclass(frozen=True)
class _Probe:
    """What is done to K and V of each layer, to see what it changes."""

    name: str
    rounding: Rounding
    scales: dict[int, LayerScales]
    dtype: torch.dtype


@torch.inference_mode()
def layer_errors(
    model: PreTrainedModel, documents: Iterable[Tensor], variants: Sequence[Variant]
) -> tuple[dict[str, dict[int, LayerError]], dict[int, LayerValues]]:
    """Errors by variant and layer, and K and V by layer; each layer is given the reference's input.

    Layers that read another layer's cache are left out.
    """
    repeats = {m.layer_idx: m.kv_repeat for m in map_attention(model).cached.values()}
    probes = [_probe(v.name, v.scales, v.tensors) for v in variants if v.scales is not None]
    found: dict[str, dict[int, LayerError]] = {probe.name: {} for probe in probes}
    values: dict[int, LayerValues] = {}

    def attend(
        original: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        out = original(module, query, key, value, *args, **kwargs)
        layer_idx: Any = module.layer_idx
        if layer_idx not in repeats:
            return out
        stored = (key[:, :: repeats[layer_idx]], value[:, :: repeats[layer_idx]])
        held = layer_values(layer_idx, *stored)
        values[layer_idx] = values[layer_idx].merge(held) if layer_idx in values else held
        for probe in (each for each in probes if layer_idx in each.scales):
            rounded = probe.rounding(layer_idx, query, key, value)
            other = original(module, *rounded, *args, **kwargs)
            seen = _seen(*stored, probe.scales[layer_idx], probe.dtype)
            _add(found[probe.name], layer_idx, _tokens_last(out), _tokens_last(other), *seen)
        return out

    with swap_attention(model, attend):
        for token_ids in documents:
            model.get_decoder()(input_ids=token_ids[None].to(model.device), use_cache=False)
    return found, values


def _probe(name: str, scales: KVScales, tensors: str) -> _Probe:
    by_layer = {layer.layer_idx: layer for layer in scales.layers.values()}
    return _Probe(name, fp8_rounding(scales, tensors), by_layer, FP8_DTYPES[scales.fp8_dtype])


def _tokens_last(out: Any) -> Tensor:
    # [B, T, H, D] from the attention interface; [B, H, T, D] from SDPA itself
    tokens: Tensor = out[0][0] if isinstance(out, tuple) else out[0].transpose(0, 1)
    return tokens.float()


def _seen(
    key: Tensor, value: Tensor, scales: LayerScales, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Saturated, underflowed and amax of K and V, [2, K] each, and values per head."""
    counted = []
    for x, scale, centre in ((key, scales.k, scales.k_center), (value, scales.v, None)):
        scale = broadcast_scale(scale, x)
        x = x if centre is None else x - broadcast_scale(centre, x)
        scaled = (x[0].float() / scale).abs()
        zero = (quantize(x[0], scale, dtype).float() == 0) & (x[0] != 0)
        counted.append(
            (
                (scaled > fp8_max(dtype)).sum((1, 2)),
                zero.sum((1, 2)),
                scaled.amax((1, 2)) / fp8_max(dtype),
            )
        )
    saturated, underflowed, amax = (torch.stack(pair).cpu() for pair in zip(*counted, strict=True))
    return saturated, underflowed, amax, key.shape[2] * key.shape[3]


def _add(
    layers: dict[int, LayerError], layer_idx: int, out: Tensor, other: Tensor, saturated: Tensor,
    underflowed: Tensor, amax: Tensor, values: int,
) -> None:  # fmt: skip
    error = (other - out).square().sum((0, 2))[None].double().cpu()
    power = out.square().sum((0, 2))[None].double().cpu()
    if layer_idx not in layers:
        layers[layer_idx] = LayerError(
            layer_idx, error, power, saturated, underflowed, values, amax
        )
        return
    layer = layers[layer_idx]
    layer.error = torch.cat([layer.error, error])
    layer.power = torch.cat([layer.power, power])
    layer.saturated += saturated
    layer.underflowed += underflowed
    layer.values += values
    layer.amax = torch.maximum(layer.amax, amax)
