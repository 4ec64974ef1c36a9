"""What the attention launchers share."""

from typing import Any

import torch
import triton
from torch import Tensor

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.kernels.targets import Target
from fp8kv_runtime.options import AttentionOptions
from fp8kv_runtime.storage import KVBlocks


def scale_dims(scale: Tensor) -> int:
    """0 for one scale per tensor, 1 per head, 2 per head and channel."""
    return scale.dim() if scale.numel() > 1 else 0


def loaded_as(blocks: KVBlocks) -> tuple[Tensor, Tensor]:
    """K and V as kernels read them: [num_blocks, K, block_size, D / 2] int16, or float16 of D.

    Raises:
        ValueError: head_dim is odd.
    """
    if blocks.head_dim % 2:
        raise ValueError(f"kernels need an even head_dim, got {blocks.head_dim}")
    if blocks.format == "float16":
        return blocks.key, blocks.value
    return blocks.key.view(torch.int16), blocks.value.view(torch.int16)


def layer_constants(
    query: Tensor,
    blocks: KVBlocks,
    sequences: PagedSequences,
    options: AttentionOptions,
    target: Target,
) -> dict[str, Any]:
    """Compile-time constants of an attention kernel that the layer and its options fix."""
    num_heads = query.shape[1]
    # softmax does not see what a centre takes from every score alike
    center_matters = options.sinks is not None or options.softcap is not None
    return {
        "NUM_KV_HEADS": blocks.num_kv_heads,
        "GROUP": num_heads // blocks.num_kv_heads,
        "HEAD_DIM": blocks.head_dim,
        # a matrix instruction takes 32 bytes of every row, from even and odd channels apart
        "BLOCK_D": max(64, triton.next_power_of_2(blocks.head_dim)),
        "BLOCK_SIZE": blocks.block_size,
        "K_SCALES": scale_dims(blocks.k_scale),
        "Q_SCALES": 0 if options.q_scale is None else scale_dims(options.q_scale),
        "WINDOW": options.sliding_window or 0,
        "SOFTCAP": options.softcap is not None,
        "HAS_CENTER": blocks.k_center is not None and center_matters,
        "HAS_SINKS": options.sinks is not None,
        "HAS_STARTS": sequences.seq_starts is not None,
        "Q_FP8": options.q_scale is not None,
        "Q_REST": scale_dims(blocks.k_scale) == 2 or query.dtype == torch.float32,
        "P_REST": query.dtype == torch.float32,
        "FORMAT": blocks.format,
        "HARDWARE": target.decodes(blocks.format),
        "PTX": target.backend == "cuda",
        "ENCODES": target.encodes(blocks.format),
        "MULTIPLIES": target.multiplies(blocks.format),
    }
