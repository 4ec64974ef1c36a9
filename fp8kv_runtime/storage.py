"""`KVBlocks`: the FP8 bytes of one attention layer's K and V, with the scales that restore them.

Blocks of float16 are taken as well, with the same meaning: twice as large, for kernels to be
measured against themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize, quantize

BLOCK_DTYPES: dict[str, torch.dtype] = {**FP8_DTYPES, "float16": torch.float16}
_ON_HOST: Any = WeakTensorKeyDictionary()  # of scales on a GPU: their version, and their values on the CPU
_FORMATS = {dtype: name for name, dtype in BLOCK_DTYPES.items()}


class BlocksLayout(NamedTuple):
    """Facts that kernels are compiled for; fixed for a layer's whole life."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    format: str
    k_scales: int  # as `scale_dims`
    v_scales: int
    has_center: bool
    counts: bool


@dataclass(frozen=True)
class KVBlocks:
    """Blocks of one attention layer. `K ≈ key * k_scale + k_center`, `V ≈ value * v_scale`.

    Raises:
        ValueError: shapes, types or scales do not fit together.
    """

    codes: Tensor  # [2, num_blocks, K, block_size, D] FP8 or float16: K, then V
    k_scale: Tensor  # [1], [K] or [K, D] float32
    v_scale: Tensor  # [1], [K] or [K, D] float32
    k_center: Tensor | None = None  # [K, D] float32, subtracted before K is stored
    counts: Tensor | None = None  # [2, K, 3] int64: K and V, per head; saturated, underflowed, not finite

    def __post_init__(self) -> None:
        codes, is_known = self.codes, self.codes.dtype in BLOCK_DTYPES.values()
        if codes.dim() != 5 or not is_known or not codes.is_contiguous():
            raise ValueError(
                f"blocks must be [2, num_blocks, K, block_size, D] FP8 or float16, contiguous, "
                f"got {_describe(codes)}"
            )
        heads, channels = (self.num_kv_heads,), (self.num_kv_heads, self.head_dim)
        scale_shapes = ((1,), heads, channels)
        shapes = {"k_scale": scale_shapes, "v_scale": scale_shapes, "k_center": (channels,)}
        for name in shapes:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            check_tensor(name, tensor, shapes[name], torch.float32, codes.device)
            low, high = host_values(tensor).aminmax()  # NaN, where there is one
            if not (low > (-torch.inf if name == "k_center" else 0) and high < torch.inf):
                raise ValueError(f"{name} must be finite{'' if name == 'k_center' else ' and positive'}")
            # one that was expanded has no memory for every head, which kernels read
            object.__setattr__(self, name, tensor.contiguous())
        if self.counts is not None:
            check_tensor("counts", self.counts, ((2, *heads, 3),), torch.int64, codes.device)

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
        """Make uninitialised blocks; `count` adds counters of what storing does to the values.

        Scales are [1], [K] or [K, D] float32; `k_center` is [K, D] float32.
        """
        shape = (2, num_blocks, num_kv_heads, block_size, head_dim * dtype.itemsize)
        # as bytes, because torch cannot fill FP8 on every device
        codes = torch.empty(shape, dtype=torch.uint8, device=device)
        return cls(
            codes.view(dtype),
            move_scale(k_scale, device),
            move_scale(v_scale, device),
            None if k_center is None else move_scale(k_center, device),
            torch.zeros(2, num_kv_heads, 3, dtype=torch.int64, device=device) if count else None,
        )

    @property
    def key(self) -> Tensor:
        """K: [num_blocks, K, block_size, D]."""
        return self.codes[0]

    @property
    def value(self) -> Tensor:
        """V: [num_blocks, K, block_size, D]."""
        return self.codes[1]

    @property
    def num_blocks(self) -> int:
        """Blocks in this layer."""
        return self.codes.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.codes.shape[2]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.codes.shape[3]

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.codes.shape[4]

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V."""
        return self.codes.numel() * self.codes.itemsize

    @property
    def format(self) -> str:
        """Name of the number format, as in `BLOCK_DTYPES`."""
        return _FORMATS[self.codes.dtype]

    @cached_property
    def layout(self) -> BlocksLayout:
        """The facts that kernels are compiled for."""
        shape = self.num_kv_heads, self.block_size, self.head_dim
        scales = scale_dims(self.k_scale), scale_dims(self.v_scale)
        return BlocksLayout(*shape, self.format, *scales, self.k_center is not None, self.counts is not None)

    @cached_property
    def stored(self) -> tuple[Tensor, Tensor]:
        """K and V as kernels write them, [num_blocks, K, block_size, D]; FP8 as uint8: sm_80 has no FP8."""
        codes = self.codes if self.format == "float16" else self.codes.view(torch.uint8)
        return codes[0], codes[1]

    @cached_property
    def loaded(self) -> tuple[Tensor, Tensor]:
        """K and V as kernels read them: [num_blocks, K, block_size, D / 2] int16, or [..., D] float16."""
        if self.head_dim % 2:
            raise ValueError(f"kernels need an even head_dim, got {self.head_dim}")
        codes = self.codes if self.format == "float16" else self.codes.view(torch.int16)
        return codes[0], codes[1]

    @cached_property
    def scales(self) -> Tensor:
        """K's and V's scales, [2, 1, K, 1, 1] or [2, 1, K, 1, D] float32."""
        key, value = per_channel(self.k_scale), per_channel(self.v_scale)
        shape = (1, self.num_kv_heads, 1, max(key.shape[2], value.shape[2]))
        return torch.stack([key.expand(shape), value.expand(shape)])

    @cached_property
    def token_bytes(self) -> Tensor:
        """The bytes, uint8 [num_blocks, block_size, 2, K, D], of float16 2 * D: torch may not index FP8."""
        with torch.inference_mode(False):  # or it could not be written outside inference mode
            return self.codes.view(torch.uint8).permute(1, 3, 0, 2, 4)

    @cached_property
    def k_scale_values(self) -> list[float]:
        """K's scales on the host, where they are not per channel."""
        return host_values(self.k_scale).flatten().tolist()

    @cached_property
    def specialization(self) -> tuple[Any, ...]:
        """`specialization` of every tensor here, and the device: each loads kernels of its own."""
        tensors = (*self.stored, self.k_scale, self.v_scale, self.k_center, self.counts)
        return self.codes.device, *map(specialization, tensors)

    def dense(self, block_tables: Tensor, length: int) -> Tensor:
        """Dequantise the first `length` tokens of `block_tables` [S, max_blocks]: [2, S, K, N, D] float32."""
        used = block_tables[:, : -(-length // self.block_size)]
        # as bytes, because torch cannot index FP8 on every device
        stored = self.codes.view(torch.uint8)
        codes = stored.index_select(1, used.flatten())
        codes = codes.view(2, *used.shape, *stored.shape[2:])  # [2, S, blocks, K, block_size, D]
        codes = codes.transpose(2, 3).flatten(3, 4)[:, :, :, :length]
        return self.decode(codes.view(self.codes.dtype))

    def encode(self, tokens: Tensor) -> Tensor:
        """Quantise K and V [2, S, K, T, D] to codes [2, S, K, T, D]; float32 K is centred in place."""
        tokens = tokens.float()
        if self.k_center is not None:
            tokens[0] -= per_channel(self.k_center)
        return quantize(tokens, self.scales, self.codes.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        """Dequantise codes [2, S, K, T, D] to float32."""
        dense = dequantize(codes, self.scales)
        if self.k_center is not None:
            dense[0] += per_channel(self.k_center)
        return dense

    def write(self, codes: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
        """Write codes [2, S, K, T, D] to `block_ids` [S, T] and places in these, `offsets` [S, T]; int64."""
        self.token_bytes.index_put_((block_ids, offsets), codes.view(torch.uint8).permute(1, 3, 0, 2, 4))

    def copy_block(self, source: int, target: int) -> None:
        """Copy the bytes of one block over another."""
        codes = self.codes.view(torch.uint8)
        codes[:, target] = codes[:, source]

    def grown(self, num_blocks: int) -> "KVBlocks":
        """Return the same blocks and scales with room for `num_blocks`."""
        old = self.codes.view(torch.uint8)
        with torch.inference_mode(False):  # or it could not be written outside inference mode
            new = torch.empty((2, num_blocks, *old.shape[2:]), dtype=old.dtype, device=old.device)
        new[:, : self.num_blocks] = old
        return replace(self, codes=new.view(self.codes.dtype))


def host_values(scale: Tensor) -> Tensor:
    """Return scales, or a centre, of any shape on the CPU; a GPU is waited for again if they were changed."""
    if scale.is_cpu or scale.is_inference():
        return scale.cpu()
    if scale not in _ON_HOST or _ON_HOST[scale][0] != version(scale):
        _ON_HOST[scale] = version(scale), scale.cpu()
    values: Tensor = _ON_HOST[scale][1]
    return values


def move_scale(scale: Tensor, device: torch.device | str) -> Tensor:
    """Copy scales, or a centre, of any shape to a device, which is not asked for those of the CPU."""
    moved = scale.to(device)
    if scale.is_cpu and not moved.is_cpu and not moved.is_inference():
        _ON_HOST[moved] = version(moved), scale.clone()
    return moved


def version(tensor: Tensor | None) -> int:
    """Return how often a tensor, of any shape, was written to; -1 where torch does not count."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def scale_dims(scale: Tensor) -> int:
    """Return 0 for one scale per tensor [1], 1 per head [K], 2 per head and channel [K, D]."""
    return scale.dim() if scale.numel() > 1 else 0


def specialization(argument: Any) -> Any:
    """Return the key of a compiled kernel: types and alignment of memory; 1 and multiples of 16."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15 == 0
    if isinstance(argument, int):
        return argument == 1, argument & 15 == 0, argument.bit_length() > 31
    return argument is None


def per_channel(scale: Tensor) -> Tensor:
    """Reshape [1], [K] or [K, D] so that it broadcasts against [..., K, T, D]."""
    return scale.unsqueeze(-2) if scale.dim() == 2 else scale.view(-1, 1, 1)


def check_tensor(
    name: str, tensor: Tensor, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> None:
    """Check that a tensor, of any shape, has one of `shapes`, this type and device; else a ValueError."""
    if tensor.shape not in shapes or tensor.dtype != dtype or tensor.device != device:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        expected = f"{allowed} {str(dtype).removeprefix('torch.')} on {device}"
        raise ValueError(f"{name} must be {expected}, got {_describe(tensor)}")


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
