"""Options of attention beyond softmax(Q Kᵀ) V, shared by kernels and reference."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.storage import KVBlocks, check_tensor


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one attention call; scores are query times key times the softmax scale.

    `q_scale` turns on FP8 queries, as in FlashAttention 3: the query is rounded to the cache's
    format first and QKᵀ is taken in FP8.
    """

    softmax_scale: float | None = None  # default: head_dim ** -0.5
    sliding_window: int | None = None  # a token sees itself and the `sliding_window - 1` before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [H] one more score per head, which has no value
    q_scale: Tensor | None = None  # [1] or [H] float32

    def __post_init__(self) -> None:
        for name in ("sinks", "q_scale"):  # kernels read memory, not views of it
            tensor = getattr(self, name)
            object.__setattr__(self, name, None if tensor is None else tensor.contiguous())

    def scale(self, head_dim: int) -> float:
        """Return the softmax scale: the option, or head_dim ** -0.5."""
        return head_dim**-0.5 if self.softmax_scale is None else float(self.softmax_scale)

    def to(self, device: torch.device) -> "AttentionOptions":
        """Move the tensors to another device, as float32."""
        tensors = (self.sinks, self.q_scale)
        sinks, q_scale = (None if x is None else x.to(device, torch.float32) for x in tensors)
        return replace(self, sinks=sinks, q_scale=q_scale)


def check_attention(
    query: Tensor, blocks: KVBlocks, sequences: PagedSequences, options: AttentionOptions
) -> None:
    """Check shapes, types, devices and options of a call; else a ValueError. `query` must be [T, H, D]."""
    shape, device = query.shape, query.device
    num_kv_heads, head_dim = blocks.layout.num_kv_heads, blocks.layout.head_dim
    if len(shape) != 3 or shape[1] % num_kv_heads or shape[2] != head_dim:
        raise ValueError(
            f"query must be [tokens, a multiple of {num_kv_heads} heads, {head_dim}], got {list(shape)}"
        )
    num_heads, tables, sinks = shape[1], sequences.block_tables, options.sinks
    placed = device == blocks.codes.device == tables.device
    if not placed or (sinks is not None and sinks.device != device):
        where = {"blocks": blocks.codes, "block_tables": tables, "sinks": sinks}
        got = ", ".join(f"{n} on {t.device}" for n, t in where.items() if t is not None)
        raise ValueError(f"all must be on {device}, where the query is, got {got}")
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"query must be float16, bfloat16 or float32, got {query.dtype}")
    if options.sliding_window is not None and options.sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {options.sliding_window}")
    if options.softcap is not None and options.softcap <= 0:
        raise ValueError(f"softcap must be positive, got {options.softcap}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks must be [{num_heads}], got {list(sinks.shape)}")
    if options.q_scale is None:
        return
    if blocks.layout.format == "float16":
        raise ValueError("FP8 queries need FP8 blocks, got float16")
    if blocks.k_scale.dim() == 2:
        raise ValueError("FP8 queries need K scales [1] or [K]: one per channel cannot be taken out")
    check_tensor("q_scale", options.q_scale, ((1,), (num_heads,)), torch.float32, device)
