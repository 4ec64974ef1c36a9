"""vLLM's own Triton writer of latents for DeepSeek-V3.2, in Triton's interpreter.

The interpreter knows no PTX: E2M1 is ours here.
"""

from typing import NamedTuple
from unittest.mock import patch

import cache_writers  # noqa: F401  (tells Triton to interpret)
import torch
import triton.language as tl
from right_casts import right_casts
from torch import Tensor
from triton.runtime import interpreter

from calib.caches.blocks import e2m1

_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_LATENT, _K_PE = 512, 64


class Written(NamedTuple):
    """What was stored, and of what."""

    latent: Tensor  # [tokens, 512] float32, as the writer's own norm made it
    k_pe: Tensor  # [tokens, 64] float32
    record: Tensor  # [tokens, bytes] uint8


def write(name: str, x: Tensor, weight: Tensor, k_pe: Tensor) -> Written:
    """Store `x` [tokens, 512], after a norm with `weight`, and `k_pe`, at angles of 0."""
    from vllm.models.deepseek_v32.common import kernels

    tokens, one = len(x), torch.ones
    cache = torch.zeros(1, tokens, _BYTES[name], dtype=torch.uint8)
    latent, rotated = torch.zeros(tokens, _LATENT), torch.zeros(tokens, _K_PE)
    angles = torch.cat([one(tokens, _K_PE // 2), torch.zeros(tokens, _K_PE // 2)], 1)
    slots = torch.arange(tokens)
    with (
        right_casts(),
        patch.object(kernels.tl, "inline_asm_elementwise", _packed),
    ):
        kernels.fused_norm_rope(
            *(slots, one(tokens, 16), one(16), 1e-6, x, weight, 1e-6, k_pe, angles),
            *(None, None, None, 1e-6, None, torch.zeros(tokens, 8, dtype=torch.int32)),
            slot_mapping=slots, mla_kv_cache=cache, mla_kv_cache_dtype=name, has_indexer=False,
            kv_c_out=latent, k_pe_out=rotated,
        )  # fmt: skip
    assert torch.equal(rotated, k_pe)
    return Written(latent, k_pe, cache[0])


def _packed(asm, constraints, args, dtype, **_):
    """Two E2M1 codes to a byte, the even channel's in the low bits."""
    assert "e2m1x2" in asm
    even, odd = (e2m1_codes(e2m1(torch.from_numpy(each.handle.data))) for each in args)
    handle = interpreter.TensorHandle((even + 16 * odd).int().numpy(), tl.int32)
    return tl.tensor(handle, tl.block_type(tl.int32, list(even.shape)))


def e2m1_codes(values: Tensor) -> Tensor:
    """Codes 0 to 15 of E2M1 values, the sign in the highest bit."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.searchsorted(sizes, values.abs().contiguous())
    return (codes + 8 * torch.signbit(values)).to(torch.uint8)
