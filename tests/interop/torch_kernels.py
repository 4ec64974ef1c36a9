"""vLLM's FP8 cache on a CPU that it has no kernel for: the three calls it makes, in plain torch.

vLLM's loader, scheduler and attention layers stay its own; they hand these functions the scales
they hold, as they do their kernels. Where vLLM has kernels (AVX-512, AMX) nothing is replaced.
"""

import inspect

import torch
from torch.nn.functional import scaled_dot_product_attention

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def is_needed():
    """Whether vLLM has no kernel for an FP8 cache on this CPU."""
    return not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported())


def install():
    """Replace what vLLM's CPU backend calls, for FP8 caches only."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends import cpu_attn

    for module, name, ours in (
        (cpu_attn, "_get_attn_isa", None),
        (_custom_ops, "cpu_attn_get_scheduler_metadata", None),
        (_custom_ops, "cpu_attn_reshape_and_cache", reshape_and_cache),
        (_custom_ops, "cpu_attention_with_kv_cache", attention_with_kv_cache),
    ):
        setattr(module, name, _for_fp8(getattr(module, name), ours))


def _for_fp8(theirs, ours):
    """`ours` where the cache is FP8; without one, `theirs` asked as for a 16-bit cache."""
    signature = inspect.signature(theirs)

    def call(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        if not str(given.get("kv_cache_dtype")).startswith("fp8"):
            return theirs(**given)
        return ours(**given) if ours else theirs(**given | {"kv_cache_dtype": "auto"})

    return call


def reshape_and_cache(*, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, **unused):
    """Divide by the scale, clamp, round to FP8 and write to the slots; -1 is padding.

    key, value: [tokens, KV heads, head_dim]; caches: [blocks, KV heads, block size, head_dim].
    """
    slots = slot_mapping[slot_mapping >= 0]
    blocks, offsets = slots // key_cache.shape[2], slots % key_cache.shape[2]
    for states, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        kept = states[: len(slot_mapping)][slot_mapping >= 0].float() / scale
        cache[blocks, :, offsets] = kept.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def attention_with_kv_cache(
    *, query, key_cache, value_cache, output, query_start_loc, seq_lens, block_table, scale, k_scale, v_scale,
    **unused,
):  # fmt: skip
    """Attend to every sequence's blocks, causally; query, output: [tokens, heads, head_dim]."""
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        blocks = block_table[i, : -(-length // key_cache.shape[2])].long()
        k = _read(key_cache[blocks], length) * k_scale
        v = _read(value_cache[blocks], length) * v_scale
        q = query[rows].transpose(0, 1).float()
        visible = torch.ones(q.shape[1], length, dtype=torch.bool).tril(length - q.shape[1])
        made = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=True
        )
        output[rows] = made[0].transpose(0, 1).to(output.dtype).view_as(output[rows])


def _read(blocks, length):
    """[blocks, KV heads, block size, head_dim] of bytes as [KV heads, length, head_dim]."""
    return blocks.view(FP8).float().transpose(0, 1).flatten(1, 2)[:, :length]
