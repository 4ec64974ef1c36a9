"""FP8 attention the plain way: no cache at all, K and V rounded where attention receives them."""

from contextlib import contextmanager

import torch

from calib.capture.attention import map_attention
from calib.scales.scales import KVScales, LayerScales
from fp8kv_runtime.fp8 import FP8_DTYPES
from fp8kv_runtime.hf import swap_attention


def scales_for(model, *, strategy="attn_head", fp8_dtype="e4m3fn", with_q=False):
    """Scales that clip some values and flush others, so that every scale shows."""
    generator = torch.Generator().manual_seed(0)

    def scale(heads, low, high, channels=1):
        shape = {"tensor": (1,), "attn_head": (heads,), "channel": (heads, channels)}
        return low + (high - low) * torch.rand(shape[strategy], generator=generator)

    def layer(module):
        if module.latent:
            one = scale(1, 0.002, 0.01)  # for the latent and k_pe
            return LayerScales(module.layer_idx, one, one, latent=True)
        k = scale(module.num_kv_heads, 0.002, 0.01, module.head_dim)
        v = scale(module.num_kv_heads, 0.0005, 0.005, module.v_head_dim)
        q = scale(module.num_heads, 0.002, 0.01, module.head_dim) if with_q else None
        return LayerScales(module.layer_idx, k, v, q)

    modules = map_attention(model).cached
    return KVScales(strategy, fp8_dtype, {name: layer(module) for name, module in modules.items()})


@contextmanager
def fake_quantized(model, scales, *, quantize_query=False, tensors="kv"):
    """Inside the block `model`, run without a cache, attends to K and V, or one of them, rounded to FP8."""
    by_index = {layer.layer_idx: layer for layer in scales.layers.values()}
    owners, dtype = {}, FP8_DTYPES[scales.fp8_dtype]

    def attend(original, module, query, key, value, *args, **kwargs):
        layer = by_index.get(module.layer_idx) or owners.get(id(key), (None,))[0]
        if layer is None:
            return original(module, query, key, value, *args, **kwargs)
        # modules that share another's K and V get the same tensor; it is kept, or the next would have its id
        owners[id(key)] = layer, key
        if quantize_query:
            query = rounded(query, layer.q, dtype)
        centre = 0.0 if layer.k_center is None else layer.k_center.unsqueeze(1)
        key = rounded(key - centre, layer.k, dtype) + centre if "k" in tensors else key
        value = rounded(value, layer.v, dtype) if "v" in tensors else value
        return original(module, query, key, value, *args, **kwargs)

    with swap_attention(model, attend):
        yield


def rounded(x, scale, dtype):
    """[B, H, T, D] rounded to FP8 and restored, by torch's own casts."""
    if scale.dim() == 2:
        scale = scale.unsqueeze(1)
    else:
        scale = scale.repeat_interleave(x.shape[1] // len(scale) if len(scale) > 1 else 1).view(-1, 1, 1)
    largest = torch.finfo(dtype).max
    return ((x / scale).clamp(-largest, largest).to(dtype).float() * scale).to(x.dtype)
