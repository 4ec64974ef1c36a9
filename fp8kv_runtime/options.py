"""What an attention layer does besides softmax(Q Kᵀ) V; the same for kernels and reference."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8kv_runtime.storage import KVBlocks


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one attention call, in the units of unscaled scores.

    `q_scale` turns on FP8 queries, as in FlashAttention 3: the query is rounded to the cache's
    format first and QKᵀ is taken in FP8.
    """

    softmax_scale: float | None = None  # default: head_dim ** -0.5
    sliding_window: int | None = None  # a token sees itself and the `sliding_window - 1` before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [H] one more logit per head, which has no value
    q_scale: Tensor | None = None  # [1] or [H] float32

    def __post_init__(self) -> None:
        for name in ("sinks", "q_scale"):  # kernels read memory, not views of it
            tensor = getattr(self, name)
            object.__setattr__(self, name, None if tensor is None else tensor.contiguous())

    def scale(self, head_dim: int) -> float:
        """The softmax scale in force."""
        return head_dim**-0.5 if self.softmax_scale is None else float(self.softmax_scale)

    def to(self, device: torch.device) -> "AttentionOptions":
        """The same with its tensors, as float32, on another device."""
        tensors = {name: getattr(self, name) for name in ("sinks", "q_scale")}
        moved = {n: t if t is None else t.to(device, torch.float32) for n, t in tensors.items()}
        return replace(self, **moved)


def check_attention(query: Tensor, blocks: KVBlocks, options: AttentionOptions) -> None:
    """Check what kernels take for granted.

    Raises:
        ValueError: shapes, types or options do not fit together.
    """
    if (
        query.dim() != 3
        or query.shape[1] % blocks.num_kv_heads
        or query.shape[2] != blocks.head_dim
    ):
        raise ValueError(
            f"query must be [tokens, a multiple of {blocks.num_kv_heads} heads, "
            f"{blocks.head_dim}], got {list(query.shape)}"
        )
    num_heads = query.shape[1]
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"query must be float16, bfloat16 or float32, got {query.dtype}")
    if options.sliding_window is not None and options.sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {options.sliding_window}")
    if options.softcap is not None and options.softcap <= 0:
        raise ValueError(f"softcap must be positive, got {options.softcap}")
    if options.sinks is not None and options.sinks.shape != (num_heads,):
        raise ValueError(f"sinks must be [{num_heads}], got {list(options.sinks.shape)}")
    if options.q_scale is not None and blocks.format == "float16":
        raise ValueError("FP8 queries need FP8 blocks, got float16")
    if options.q_scale is not None and blocks.k_scale.dim() == 2:
        raise ValueError(
            "FP8 queries need K scales [1] or [K]: one per channel cannot be taken out"
        )
    if options.q_scale is not None and options.q_scale.shape not in ((1,), (num_heads,)):
        raise ValueError(f"q_scale must be [1] or [{num_heads}], got {list(options.q_scale.shape)}")
