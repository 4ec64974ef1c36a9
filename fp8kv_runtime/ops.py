"""Operators `torch.ops.fp8kv`: append, decode and extend as `torch.compile` can keep in a graph.

Every function takes what the launcher or reference of its name takes and calls its operator, whose
arguments are tensors and numbers only. Calls that are not compiled go to launchers directly: what
an operator rebuilds costs time. `Library.impl` because a call of `custom_op` takes ten times as
long as one of these.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8kv_runtime import reference
from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.options import AttentionOptions
from fp8kv_runtime.storage import KVBlocks

_BLOCKS = "Tensor{} codes, Tensor k_scale, Tensor v_scale, Tensor? k_center"
_ATTENTION = (
    "Tensor query, " + _BLOCKS.format("") + ", Tensor block_tables, Tensor seq_lens, "
    "Tensor? seq_starts, float? softmax_scale, SymInt? sliding_window, float? softcap, "
    "Tensor? sinks, Tensor? q_scale"
)

_LIBRARY: Any = torch.library.Library("fp8kv", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "append_kv(Tensor key, Tensor value, Tensor slot_mapping, " + _BLOCKS.format("(a!)") + ", "
    "Tensor(b!)? counts, bool use_triton) -> ()"
)
_LIBRARY.define("dense(" + _BLOCKS.format("") + ", Tensor block_tables, SymInt length) -> Tensor")
_LIBRARY.define(f"decode_attention({_ATTENTION}, bool use_triton) -> Tensor")
_LIBRARY.define(
    f"extend_attention({_ATTENTION}, Tensor cu_seqlens, SymInt max_query_len, bool use_triton) -> Tensor"
)


def attention_functions() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Decode and extend attention: operators while torch.compile is tracing, else launchers."""
    if torch.compiler.is_compiling():
        return decode_attention, extend_attention
    from fp8kv_runtime.kernels import decode, extend

    return decode.decode_attention, extend.extend_attention


def append_kv(
    key: Tensor, value: Tensor, blocks: KVBlocks, slot_mapping: Tensor, *, use_triton: bool = True
) -> None:
    """Quantise and store K and V, see `reference.append_kv`; `use_triton` picks the kernel."""
    torch.ops.fp8kv.append_kv(key, value, slot_mapping, *_of_blocks(blocks), blocks.counts, use_triton)


def decode_attention(
    query: Tensor, blocks: KVBlocks, sequences: PagedSequences, options: AttentionOptions,
    *, use_triton: bool = True,
) -> Tensor:  # fmt: skip
    """Attend from the last token of each sequence, see `reference.decode_attention`."""
    flat = _of_attention(query, blocks, sequences, options)
    out: Tensor = torch.ops.fp8kv.decode_attention(*flat, use_triton)
    return out


def extend_attention(
    query: Tensor, blocks: KVBlocks, sequences: PagedSequences, cu_seqlens: Tensor,
    max_query_len: int, options: AttentionOptions, *, use_triton: bool = True,
) -> Tensor:  # fmt: skip
    """Attend from the last tokens of each sequence, see `reference.extend_attention`."""
    flat = _of_attention(query, blocks, sequences, options)
    out: Tensor = torch.ops.fp8kv.extend_attention(*flat, cu_seqlens, max_query_len, use_triton)
    return out


def dense(blocks: KVBlocks, block_tables: Tensor, length: int) -> Tensor:
    """Dequantise the first tokens of sequences, see `KVBlocks.dense`."""
    out: Tensor = torch.ops.fp8kv.dense(*_of_blocks(blocks), block_tables, length)
    return out


def _of_blocks(blocks: KVBlocks) -> tuple[Tensor | None, ...]:
    return blocks.codes, blocks.k_scale, blocks.v_scale, blocks.k_center


def _of_attention(
    query: Tensor, blocks: KVBlocks, sequences: PagedSequences, options: AttentionOptions
) -> tuple[Any, ...]:
    """The arguments that decode and extend share, in the order of `_ATTENTION`."""
    return (
        query.detach(), *_of_blocks(blocks),
        sequences.block_tables, sequences.seq_lens, sequences.seq_starts,
        options.softmax_scale, options.sliding_window, options.softcap, options.sinks,
        options.q_scale,
    )  # fmt: skip


def _append(
    key: Tensor, value: Tensor, slot_mapping: Tensor, codes: Tensor, k_scale: Tensor,
    v_scale: Tensor, k_center: Tensor | None, counts: Tensor | None, use_triton: bool,
) -> None:  # fmt: skip
    blocks = _blocks(codes, k_scale, v_scale, k_center, counts)
    _implementation(use_triton).append_kv(key, value, blocks, slot_mapping)


def _decode(query: Tensor, *given: Any) -> Tensor:
    *flat, use_triton = given
    out: Tensor = _implementation(use_triton).decode_attention(query, *_rebuilt(*flat))
    return out


def _extend(query: Tensor, *given: Any) -> Tensor:
    *flat, cu_seqlens, max_query_len, use_triton = given
    blocks, sequences, options = _rebuilt(*flat)
    out: Tensor = _implementation(use_triton).extend_attention(
        query, blocks, sequences, cu_seqlens, max_query_len, options
    )
    return out


def _dense(
    codes: Tensor, k_scale: Tensor, v_scale: Tensor, k_center: Tensor | None, tables: Tensor,
    length: int,
) -> Tensor:  # fmt: skip
    return _blocks(codes, k_scale, v_scale, k_center, None).dense(tables, length).contiguous()


def _rebuilt(
    codes: Tensor, k_scale: Tensor, v_scale: Tensor, k_center: Tensor | None,
    tables: Tensor, lens: Tensor, starts: Tensor | None, *options: Any,
) -> tuple[KVBlocks, PagedSequences, AttentionOptions]:  # fmt: skip
    blocks = _blocks(codes, k_scale, v_scale, k_center, None)
    return blocks, PagedSequences(tables, lens, starts), AttentionOptions(*options)


def _blocks(*tensors: Tensor | None) -> KVBlocks:
    """Blocks whose tensors were checked when they were made: to check waits for the GPU."""
    blocks = object.__new__(KVBlocks)
    vars(blocks).update(zip(KVBlocks.__dataclass_fields__, tensors, strict=True))
    return blocks


def _implementation(use_triton: bool) -> Any:
    if not use_triton:
        return reference
    import fp8kv_runtime  # its launchers

    return fp8kv_runtime


def _like_query(query: Tensor, *given: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _dense_shape(codes: Tensor, *given: Any) -> Tensor:
    *_, tables, length = given
    shape = (2, tables.shape[0], codes.shape[2], length, codes.shape[4])
    return codes.new_empty(shape, dtype=torch.float32)


for _name, _kernel, _fake in (
    ("append_kv", _append, lambda *given: None),
    ("dense", _dense, _dense_shape),
    ("decode_attention", _decode, _like_query),
    ("extend_attention", _extend, _like_query),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8kv::{_name}", _fake, lib=_LIBRARY)
