"""Import before Triton: engines' kernels in its interpreter, with the casts and products of a GPU.

Its own casts to 8 and 16 bits cut bits off, which no GPU does, and it multiplies bfloat16 as if the
bits were integers.
"""

import os
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

# Triton looks when it is imported
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch
import triton.language as tl
from triton.backends import backends
from triton.runtime import interpreter

# vLLM's build for CPUs asks for a backend that the interpreter does not need
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
_EIGHT = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz}
_CASTS = _EIGHT | {tl.bfloat16: torch.bfloat16}
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def vllm_attention(query, key, value, length: int, out, **options):
    """vLLM's kernel, launched as by its Triton backend, for queries [T, H, D] of a sequence of blocks."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    ends, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, len(query)], [length]))
    tables = {"cu_seqlens_q": ends, "seqused_k": lengths, "max_seqlen_q": len(query), "max_seqlen_k": length}
    tables["block_table"] = torch.arange(len(key), dtype=torch.int32)[None]
    options = {"window_size": (-1, -1), "softcap": 0, "q_descale": None} | options
    how = {"softmax_scale": query.shape[-1] ** -0.5, "causal": True}
    with right_casts():
        unified_attention(q=query, k=key, v=value, out=out, **tables, **how, **options)
    return out


@contextmanager
def right_casts():
    """Inside the block casts between float32 and E4M3, E4M3FNUZ or bfloat16 are PyTorch's."""
    casts = patch.object(interpreter, "_convert_float", _cast)
    with casts, patch.object(interpreter.InterpreterBuilder, "create_dot", _dot):
        yield


def _cast(data, from_dtype, to_dtype, rounding_mode, *, original=interpreter._convert_float):
    source, target = (_CASTS.get(dtype, torch.float32) for dtype in (from_dtype, to_dtype))
    if tl.float32 not in (from_dtype, to_dtype) or source == target:
        return original(data, from_dtype, to_dtype, rounding_mode)
    array, limit = torch.from_numpy(np.ascontiguousarray(data)), torch.finfo(target).max
    values = array.view(source).float().clamp(-limit, limit).to(target)
    return values.view(_UNSIGNED[target.itemsize]).numpy()


def _dot(self, a, b, d, *args, original=interpreter.InterpreterBuilder.create_dot):
    a, b = (self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return original(self, a, b, d, *args)
