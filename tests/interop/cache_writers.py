"""Engines' own Triton writers of KV caches, in Triton's interpreter."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

# Triton looks when it is imported
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import triton
from torch import Tensor
from triton.backends import backends

# where the Makefile puts LMDeploy: apart, as it wants other versions of everything
LMDEPLOY = Path(sys.prefix) / "lmdeploy" / "lmdeploy"


def install() -> None:
    """Make both engines' kernels importable; nothing of them is copied."""
    # vLLM's build for CPUs asks for a backend that the interpreter does not need
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
    # LMDeploy's packages without what they import for serving
    for name in ("", ".pytorch", ".pytorch.kernels", ".pytorch.kernels.cuda"):
        package = sys.modules[f"lmdeploy{name}"] = ModuleType(f"lmdeploy{name}")
        package.__path__ = [str(LMDEPLOY.joinpath(*name.split(".")))]


def vllm_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [tokens, heads, D] and scales [tokens, heads] as `int8_per_token_head` stores `x`."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    return _per_token_head(x, x.shape[-1], torch.int8, KVQuantMode.INT8_PER_TOKEN_HEAD)


def vllm_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `vllm_int8`: two codes to a byte, the zero point in the scale's low bits."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    return _per_token_head(x, x.shape[-1] // 2, torch.uint8, KVQuantMode.INT4_PER_TOKEN_HEAD)


def _per_token_head(x: Tensor, width: int, dtype: torch.dtype, mode) -> tuple[Tensor, Tensor]:
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as ops

    tokens, heads, _ = x.shape
    codes = [torch.zeros(1, tokens, heads, width, dtype=dtype) for _ in "kv"]
    scales = [torch.zeros(1, tokens, heads) for _ in "kv"]
    ops.triton_reshape_and_cache_flash_per_token_head_quant(x, x, *codes, *scales, torch.arange(tokens), mode)
    assert torch.equal(codes[0], codes[1])
    assert torch.equal(scales[0], scales[1])
    return codes[0][0], scales[0][0]


def vllm_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `fp8_per_token_head` casts to E4M3, and scales: the interpreter's own cast is wrong."""
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as ops

    tokens, heads, dim = x.shape
    limit, least = ops._PER_TOKEN_HEAD_QUANT_PARAMS[torch.float8_e4m3fn]
    scaled, scales = torch.zeros(1, tokens, heads, dim), torch.zeros(1, tokens, heads)
    ops._reshape_cache_per_token_head[(tokens, heads)](
        *(x, x, scaled, scaled, scales, scales, torch.arange(tokens)),
        *(*x.stride()[:2], *x.stride()[:2]),
        *(*scaled.stride()[:3], *scaled.stride()[:3]),
        *(*scales.stride(), *scales.stride()),
        block_size=tokens,
        head_size=dim,
        head_size_v=dim,
        HEAD_SIZE_PADDED=triton.next_power_of_2(dim),
        QUANT_MAX=limit,
        QUANT_MIN=least,
        IS_INT_QUANT=False,
    )
    return scaled[0], scales[0]


def lmdeploy(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes [tokens, heads, D * bits / 8], and scales beside zero points [tokens, heads, 2]."""
    from lmdeploy.pytorch.kernels.cuda.fill_kv_cache import fill_kv_cache

    tokens, heads, dim = x.shape
    block = triton.next_power_of_2(tokens)
    codes = [torch.zeros(1, block, heads, dim * bits // 8, dtype=torch.uint8) for _ in "kv"]
    meta = [torch.zeros(1, block, heads, 2) for _ in "kv"]
    one = torch.tensor([tokens])
    fill_kv_cache(
        *(x, x, *codes),
        q_start_loc=torch.tensor([0]),
        q_seq_length=one,
        kv_seq_length=one,
        max_q_seq_length=tokens,
        block_offsets=torch.zeros(1, 2, dtype=torch.int64),
        k_scales_zeros=meta[0],
        v_scales_zeros=meta[1],
        quant_policy=bits,
    )
    assert torch.equal(codes[0], codes[1])
    return codes[0][0, :tokens], meta[0][0, :tokens]


def vllm_attention(query: Tensor, x: Tensor, bits: int) -> Tensor:
    """Attention of one query [heads, D] over K = V = `x`, which vLLM stores and reads."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    codes, scales = (vllm_int4 if bits == 4 else vllm_int8)(x)
    out = torch.zeros_like(query[None])
    unified_attention(
        q=query[None].contiguous(),
        k=codes[None],
        v=codes[None],
        out=out,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen_q=1,
        seqused_k=torch.tensor([len(x)], dtype=torch.int32),
        max_seqlen_k=len(x),
        softmax_scale=query.shape[-1] ** -0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        kv_quant_mode=KVQuantMode[f"INT{bits}_PER_TOKEN_HEAD"],
        k_scale_cache=scales[None],
        v_scale_cache=scales[None],
    )
    return out[0]
