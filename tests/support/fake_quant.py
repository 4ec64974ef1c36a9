"""FP8 attention the plain way: no cache at all, K and V rounded where attention receives them."""

from contextlib import contextmanager

import torch

from calib.capture.attention import map_attention, observe_qkv
from calib.scales.scales import KVScales, LayerScales
from fp8kv_runtime.fp8 import FP8_DTYPES, scale_from_amax
from fp8kv_runtime.hf import swap_attention


def scales_for(model, *, strategy="attn_head", fp8_dtype="e4m3fn", with_q=False):
    """Scales that clip some values and flush others, so that every scale shows."""
    generator = torch.Generator().manual_seed(0)

    def scale(heads, low, high, channels=1):
        shape = {"tensor": (1,), "attn_head": (heads,), "channel": (heads, channels)}
        return low + (high - low) * torch.rand(shape[strategy], generator=generator)

    def latent(module):
        one = scale(1, 0.002, 0.01)  # for the latent and k_pe
        return LayerScales(module.layer_idx, one, one, latent=True)

    layers = {
        name: latent(module)
        if module.latent
        else LayerScales(
            module.layer_idx,
            scale(module.num_kv_heads, 0.002, 0.01, module.head_dim),
            scale(module.num_kv_heads, 0.0005, 0.005, module.v_head_dim),
            scale(module.num_heads, 0.002, 0.01, module.head_dim) if with_q else None,
        )
        for name, module in map_attention(model).cached.items()
    }
    return KVScales(strategy, fp8_dtype, layers)


def measured_scales(model, input_ids):
    """Per-head scales from the amax of one prompt."""
    modules, amax = map_attention(model).cached, {}

    def note(name, query, key, value):
        amax[name] = [x.float().abs().amax((0, 2, 3)) for x in (key, value)]

    with torch.inference_mode(), observe_qkv(model, note):
        model(input_ids, use_cache=False)
    layers = {
        name: LayerScales(modules[name].layer_idx, *map(scale_from_amax, pair)) for name, pair in amax.items()
    }
    return KVScales("attn_head", "e4m3fn", layers)


@contextmanager
def fake_quantized(model, scales, *, quantize_query=False):
    """Inside the block `model`, run without a cache, attends to K and V rounded to FP8."""
    by_index = {layer.layer_idx: layer for layer in scales.layers.values()}
    owners = {id(None): None}
    dtype = FP8_DTYPES[scales.fp8_dtype]

    def attend(original, module, query, key, value, *args, **kwargs):
        layer = by_index.get(module.layer_idx) or owners.get(id(key))
        if layer is None:
            return original(module, query, key, value, *args, **kwargs)
        owners[id(key)] = layer  # modules that share another's K and V are given the same tensor
        if quantize_query:
            query = rounded(query, layer.q, dtype)
        centre = 0.0 if layer.k_center is None else layer.k_center.unsqueeze(1)
        key = rounded(key - centre, layer.k, dtype) + centre
        value = rounded(value, layer.v, dtype)
        return original(module, query, key, value, *args, **kwargs)

    with swap_attention(model, attend):
        yield


def rounded(x, scale, dtype):
    """[B, H, T, D] rounded to FP8 and restored, by torch's own casts."""
    repeat = x.shape[1] // scale.shape[0] if scale.shape[0] > 1 else 1
    scale = scale.repeat_interleave(repeat, 0) if scale.dim() == 1 else scale.unsqueeze(1)
    scale = scale.view(-1, 1, 1) if scale.dim() == 1 else scale
    largest = torch.finfo(dtype).max
    return ((x / scale).clamp(-largest, largest).to(dtype).float() * scale).to(x.dtype)
