"""`KVBlocks`: the FP8 bytes of one attention layer's K and V, with the scales that restore them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize

# what `KVBlocks.counts` counts, in the order of its last dimension
COUNTED = ("saturated", "underflowed", "nonfinite")


@dataclass(frozen=True)
class KVBlocks:
    """Blocks of one attention layer. `K ≈ key * k_scale + k_center`, `V ≈ value * v_scale`.

    Raises:
        ValueError: shapes, types or scales do not fit together.
    """

    key: Tensor  # [num_blocks, K, block_size, D] FP8
    value: Tensor  # [num_blocks, K, block_size, D] FP8
    k_scale: Tensor  # [1], [K] or [K, D] float32
    v_scale: Tensor  # [1], [K] or [K, D] float32
    k_center: Tensor | None = None  # [K, D] float32, subtracted before K is stored
    counts: Tensor | None = None  # [2, K, 3] int64: K and V, per head, see COUNTED

    def __post_init__(self) -> None:
        if self.key.shape != self.value.shape or self.key.dtype != self.value.dtype:
            raise ValueError(
                f"K is {_describe(self.key)}, V is {_describe(self.value)}: they must be alike"
            )
        if self.key.dtype not in FP8_DTYPES.values():
            raise ValueError(f"blocks hold FP8, got {self.key.dtype}")
        heads = (self.num_kv_heads,)
        channels = (self.num_kv_heads, self.head_dim)
        for name in ("k_scale", "v_scale"):
            _check(name, getattr(self, name), ((1,), heads, channels))
        if self.k_center is not None:
            _check("k_center", self.k_center, (channels,))

    @classmethod
    def empty(
        cls,
        num_blocks: int,
        block_size: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        k_scale: Tensor,
        v_scale: Tensor,
        k_center: Tensor | None = None,
        dtype: torch.dtype = torch.float8_e4m3fn,
        device: torch.device | str = "cpu",
        count: bool = False,
    ) -> "KVBlocks":
        """Uninitialised blocks; `count` adds counters of what storing does to the values."""
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        key, value = (torch.empty(shape, dtype=torch.uint8, device=device) for _ in "kv")
        return cls(
            key.view(dtype),
            value.view(dtype),
            k_scale.to(device),
            v_scale.to(device),
            None if k_center is None else k_center.to(device),
            torch.zeros(2, num_kv_heads, 3, dtype=torch.int64, device=device) if count else None,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in this layer."""
        return self.key.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.key.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.key.shape[3]

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.key.numel()

    @property
    def format(self) -> str:
        """Name of the FP8 format, as in `FP8_DTYPES`."""
        return next(name for name, dtype in FP8_DTYPES.items() if dtype == self.key.dtype)

    def dense(self, block_tables: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """First `length` tokens of sequences [S, blocks], dequantised: 2 x [S, K, T, D] float32."""
        used = block_tables[:, : -(-length // self.block_size)]
        key = dequantize(_gather(self.key, used, length), per_channel(self.k_scale))
        value = dequantize(_gather(self.value, used, length), per_channel(self.v_scale))
        return key if self.k_center is None else key + per_channel(self.k_center), value

    def copy_block(self, source: int, target: int) -> None:
        """Copy the bytes of one block over another."""
        for blocks in (self.key.view(torch.uint8), self.value.view(torch.uint8)):
            blocks[target] = blocks[source]

    def grown(self, num_blocks: int) -> "KVBlocks":
        """The same blocks and scales with room for `num_blocks`."""
        return replace(self, key=_grown(self.key, num_blocks), value=_grown(self.value, num_blocks))


def per_channel(scale: Tensor) -> Tensor:
    """Shape [1], [K] or [K, D] so that it broadcasts against [..., K, T, D]."""
    return scale.unsqueeze(-2) if scale.dim() == 2 else scale.view(-1, 1, 1)


def _gather(blocks: Tensor, block_tables: Tensor, length: int) -> Tensor:
    """FP8 blocks of sequences [S, n], one after the other: [S, K, length, D]."""
    # as bytes, because torch cannot index FP8 on every device
    taken = blocks.view(torch.uint8)[block_tables.long()]  # [S, n, K, block_size, D]
    return taken.transpose(1, 2).flatten(2, 3)[:, :, :length].view(blocks.dtype)


def _grown(blocks: Tensor, num_blocks: int) -> Tensor:
    old = blocks.view(torch.uint8)
    with torch.inference_mode(False):  # or it could not be written outside inference mode
        new = torch.empty((num_blocks, *old.shape[1:]), dtype=old.dtype, device=old.device)
    new[: old.shape[0]] = old
    return new.view(blocks.dtype)


def _check(name: str, tensor: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    if tuple(tensor.shape) not in shapes or tensor.dtype != torch.float32:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must be {allowed} float32, got {_describe(tensor)}")
    if not torch.isfinite(tensor).all() or (name != "k_center" and not (tensor > 0).all()):
        raise ValueError(f"{name} must be finite{'' if name == 'k_center' else ' and positive'}")


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
