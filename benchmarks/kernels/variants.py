"""What is compiled offline, and what is timed on a GPU.

`VARIANTS` has every tuning row, and every branch that a layer's options open; `CASES` the rows of
`kernel_speed.py`: batch x context, then heads, head_dim and block size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from calib.bench.kernels import Case
from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.kernels.append_kv import append_kv
from fp8kv_runtime.kernels.attention import decode_attention, extend_attention
from fp8kv_runtime.kernels.dense import gather
from fp8kv_runtime.kernels.targets import Target
from fp8kv_runtime.options import AttentionOptions
from fp8kv_runtime.storage import BLOCK_DTYPES, KVBlocks
from kernels.offline import Launch, launches

_NUM_KV_HEADS = 8
_NUM_SEQS = 4
_MAX_BLOCKS = 100  # per sequence; not a multiple of 16, as little is


@dataclass(frozen=True)
class Variant:
    """A layer with its options, and which launchers are given it."""

    name: str
    launchers: tuple[str, ...]  # names in LAUNCHERS
    head_dim: int = 128
    group: int = 4  # query heads per KV head
    block_size: int = 64
    dtype: torch.dtype = torch.float16  # of queries, and of new K and V
    format: str = ""  # the target's own E4M3 where empty
    scale_dims: int = 1
    center: bool = False
    count: bool = False
    q_fp8: bool = False
    masked: bool = False  # window, softcap, sinks and left padding
    num_splits: int = 16
    new: int = 4  # tokens of each sequence, where the KV of extend is split
    large: bool = False  # more than 2 GiB of blocks, which AMD addresses in another way

    def launches(self, target: Target) -> list[Launch]:
        """All that its launchers launch on `target`."""
        blocks = self.blocks(target)
        return [
            launch
            for name in self.launchers
            for launch in launches(target, partial(LAUNCHERS[name], self, blocks))
        ]

    def options(self) -> AttentionOptions:
        """Options of the attention call."""
        num_heads = _NUM_KV_HEADS * self.group
        return AttentionOptions(
            sliding_window=1000 if self.masked else None,
            softcap=50.0 if self.masked else None,
            sinks=torch.zeros(num_heads) if self.masked else None,
            q_scale=torch.ones(num_heads) if self.q_fp8 else None,
        )

    def sequences(self, num_seqs: int = _NUM_SEQS) -> PagedSequences:
        """Make a batch of sequences."""
        lengths = torch.ones(num_seqs, dtype=torch.int32)
        tables = torch.zeros(num_seqs, _MAX_BLOCKS, dtype=torch.int32)
        return PagedSequences(tables, lengths, torch.zeros_like(lengths) if self.masked else None)

    def blocks(self, target: Target) -> KVBlocks:
        """Make the layer's blocks, empty."""
        format = self.format or ("e4m3fnuz" if target.name == "gfx942" else "e4m3fn")
        shape = (1, _NUM_KV_HEADS, self.head_dim)[: 1 + self.scale_dims][-max(self.scale_dims, 1) :]
        block_bytes = _NUM_KV_HEADS * self.block_size * self.head_dim
        return KVBlocks.empty(
            2**31 // block_bytes + 1 if self.large else 2,
            self.block_size,
            num_kv_heads=_NUM_KV_HEADS,
            head_dim=self.head_dim,
            k_scale=torch.ones(shape),
            v_scale=torch.ones(shape),
            k_center=torch.zeros(_NUM_KV_HEADS, self.head_dim) if self.center else None,
            dtype=BLOCK_DTYPES[format],
            count=self.count,
        )


def _append(variant: Variant, blocks: KVBlocks) -> None:
    new = torch.zeros(_MAX_BLOCKS, _NUM_KV_HEADS, variant.head_dim, dtype=variant.dtype)
    append_kv(new, new, blocks, torch.zeros(_MAX_BLOCKS, dtype=torch.int64))


def _decode(variant: Variant, blocks: KVBlocks) -> None:
    decode_attention(
        _query(variant),
        blocks,
        variant.sequences(),
        variant.options(),
        num_splits=variant.num_splits,
    )


def _extend(variant: Variant, blocks: KVBlocks) -> None:
    cu_seqlens = torch.arange(_NUM_SEQS + 1, dtype=torch.int32)
    sequences, options = variant.sequences(), variant.options()
    extend_attention(_query(variant), blocks, sequences, cu_seqlens, 1, options, num_splits=1)


def _gather(variant: Variant, blocks: KVBlocks) -> None:
    heads, tokens = slice(0, _NUM_KV_HEADS), slice(3, _MAX_BLOCKS)
    gather(blocks, variant.sequences(), 0, heads, tokens, variant.dtype)


def _split(variant: Variant, blocks: KVBlocks) -> None:
    cu_seqlens = torch.arange(_NUM_SEQS + 1, dtype=torch.int32) * variant.new
    extend_attention(
        _query(variant, variant.new),
        blocks,
        variant.sequences(),
        cu_seqlens,
        variant.new,
        variant.options(),
        num_splits=variant.num_splits,
    )


def _query(variant: Variant, new: int = 1) -> Tensor:  # [T, H, D]
    num_heads = _NUM_KV_HEADS * variant.group
    return torch.zeros(_NUM_SEQS * new, num_heads, variant.head_dim, dtype=variant.dtype)


LAUNCHERS: dict[str, Callable[[Variant, KVBlocks], None]] = {
    "append": _append,
    "decode": _decode,
    "extend": _extend,
    "gather": _gather,
    "split": _split,
}
_ATTEND = ("decode", "extend")
_WHOLE = ("append", *_ATTEND, "gather")
_BF16 = torch.bfloat16
_K = 1024

VARIANTS: tuple[Variant, ...] = (
    *(Variant(f"plain-{d}", _WHOLE, d) for d in (64, 80, 96, 128, 256)),
    *(Variant(f"group{g}-128", _ATTEND, group=g) for g in (1, 16)),
    Variant("splits1-128", ("decode",), num_splits=1),
    Variant("splits128-256", ("decode",), 256, num_splits=128),
    *(Variant(f"q_fp8-{d}", _ATTEND, d, q_fp8=True) for d in (64, 128, 256)),
    Variant("masked-128", _ATTEND, masked=True),
    *(Variant(f"channels-{d}", _WHOLE, d, scale_dims=2, center=True, masked=True) for d in (128, 256)),
    *(Variant(f"block16-{d}", _ATTEND, d, block_size=16) for d in (64, 128)),
    Variant("bf16-128", _WHOLE, dtype=_BF16, scale_dims=0, count=True),
    Variant("bf16-256", _ATTEND, 256, dtype=_BF16, block_size=16, q_fp8=True, masked=True),
    Variant("fp32-128", _ATTEND, dtype=torch.float32),
    *(Variant(f"float16-{d}", _WHOLE, d, format="float16") for d in (64, 128, 256)),
    Variant("e5m2-128", _WHOLE, format="e5m2", count=True),
    Variant("e5m2-q_fp8-128", _ATTEND, format="e5m2", q_fp8=True),
    Variant("large-128", _WHOLE, large=True),
    # with the config of decode, then of extend
    *(Variant(f"split{n}-128", ("split",), new=n) for n in (4, 16, 64)),
    Variant("split64-256", ("split",), 256, new=64),
    Variant("split64-channels-128", ("split",), new=64, scale_dims=2, center=True, masked=True),
    Variant("split64-float16-128", ("split",), new=64, format="float16"),
    Variant("count-128", ("append",), scale_dims=2, center=True, count=True),
)


_decode_case = partial(Case, "decode_attention")
_LONG = (16 * _K,) * 8

CASES: tuple[Case, ...] = (
    Case("append_kv", "2,048 tokens, 32 heads of 256", (2048,), 2048, 32, 32, 256, quick=True),
    Case("append_kv", "the same, counting", (2048,), 2048, 32, 32, 256, count=True),
    Case("append_kv", "1 token of each of 64", (2 * _K,) * 64, quick=True),
    _decode_case("1 x 1k", (_K,), quick=True),
    _decode_case("1 x 8k", (8 * _K,)),
    _decode_case("1 x 32k", (32 * _K,), quick=True),
    _decode_case("1 x 128k", (128 * _K,)),
    _decode_case("8 x 16k", _LONG),
    _decode_case("8 x 32k", (32 * _K,) * 8, quick=True),
    _decode_case("32 x 4k", (4 * _K,) * 32),
    _decode_case("64 x 2k", (2 * _K,) * 64),
    _decode_case("128 x 8k", (8 * _K,) * 128),
    _decode_case("1 x 128k + 31 x 4k", (128 * _K, *(4 * _K,) * 31)),
    _decode_case("32 x 8,064: the same, evenly", (8064,) * 32),
    _decode_case("8 x 16k, 32 KV heads", _LONG, num_kv_heads=32),
    _decode_case("8 x 16k, 64 / 8 heads", _LONG, num_heads=64),
    _decode_case("8 x 16k, 28 / 4 heads", _LONG, num_heads=28, num_kv_heads=4),
    _decode_case("8 x 16k, 16 / 1 heads", _LONG, num_heads=16, num_kv_heads=1),
    _decode_case("8 x 16k, head_dim 64", _LONG, head_dim=64),
    _decode_case("8 x 16k, head_dim 80", _LONG, head_dim=80),
    _decode_case("8 x 16k, head_dim 256", _LONG, head_dim=256),
    _decode_case("8 x 16k, block 16", _LONG, block_size=16),
    _decode_case("8 x 16k, block 32", _LONG, block_size=32),
    _decode_case("8 x 16k, block 128", _LONG, block_size=128),
    _decode_case("8 x 16k, FP8 query", _LONG, q_fp8=True),
    Case("extend_attention", "prompt of 8k", (8 * _K,), 8 * _K, quick=True),
    Case("extend_attention", "2k after 32k", (34 * _K,), 2 * _K),
    # KV is split: alone these are fewer programs than processors
    Case("extend_attention", "4 after 128k", (128 * _K,), 4, quick=True),
    Case("extend_attention", "64 after 32k", (32 * _K,), 64),
)
