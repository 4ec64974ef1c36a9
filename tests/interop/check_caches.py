"""Caches as our evaluation simulates them beside vLLM's own Triton writers, in the interpreter."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

# Triton looks when it is imported
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from outputs import report
from triton.backends import backends

from calib.caches.per_head import int8_codes

# tokens, heads, head_dim, size of the values
SHAPES = [
    (tokens, heads, dim, size)
    for tokens, heads in ((1, 1), (7, 3), (16, 8), (33, 2))
    for dim, size in ((64, 1.0), (128, 30.0), (96, 1e-4), (80, 4e3), (256, 1e-9))
]


def written(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of `x` [tokens, heads, head_dim] as vLLM writes them."""
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as ops
    from vllm.v1.kv_cache_interface import KVQuantMode

    tokens, heads, dim = x.shape
    codes = [torch.zeros(1, tokens, heads, dim, dtype=torch.int8) for _ in "kv"]
    scales = [torch.zeros(1, tokens, heads) for _ in "kv"]
    mode = KVQuantMode.INT8_PER_TOKEN_HEAD
    ops.triton_reshape_and_cache_flash_per_token_head_quant(
        x, x, *codes, *scales, torch.arange(tokens), mode
    )
    assert torch.equal(codes[0], codes[1])
    return codes[0][0], scales[0][0]


def main() -> None:
    """Compare every shape, byte for byte."""
    # vLLM's build for CPUs asks for a backend that the interpreter does not need
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
    problems = []
    for number, (tokens, heads, dim, size) in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(tokens, heads, dim, generator=generator) * size
        x[0, 0, : dim // 2] = x[0, 0, 0]  # halves of steps, and one magnitude many times
        x[-1, -1] = 0
        codes, scale = int8_codes(x)
        theirs, their_scale = written(x)
        if not torch.equal(codes.to(torch.int8), theirs):
            problems.append(f"{tokens} x {heads} x {dim} of {size:g}: other codes")
        if not torch.equal(scale.squeeze(-1), their_scale):
            problems.append(f"{tokens} x {heads} x {dim} of {size:g}: other scales")
    report(Path("int8_per_token_head"), problems, f"{len(SHAPES)} shapes, the same bytes")


if __name__ == "__main__":
    main()
