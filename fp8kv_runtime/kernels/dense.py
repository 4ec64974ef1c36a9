"""Prompts: K and V are decoded once, to contiguous 16 bits, and torch's own attention reads them.

Since Hopper that is cuDNN's; elsewhere torch chooses, FlashAttention first.

Codes are exact in float16 and in bfloat16, and queries stay as they are: K's scale goes into the softmax
scale, so heads of another scale are another call. V's scale multiplies the output in float32. A centre of K
takes the same from every score of a row, which softmax does not see. What differs from ours, docs/runtime.md
says (Prompts): the weights have 16 bits, and the output is rounded before V's scale, too.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.kernels.attend import decode_tile, join_halves, load_codes, row_offsets
from fp8kv_runtime.kernels.codec import decode_unit
from fp8kv_runtime.kernels.launch import Launcher, block_constants, current_target
from fp8kv_runtime.kernels.targets import Target
from fp8kv_runtime.options import AttentionOptions
from fp8kv_runtime.storage import BlocksLayout, KVBlocks, per_channel

# of K and V in 16 bits at a time, if one KV head has no more; torch's allocator gives every layer the same.
# Twice that where tokens are filled up
WORKSPACE = 2**28
_AFTER = 4  # times as many pairs make it worth to attend to earlier tokens
_VALUES = 4096  # that a program decodes
_STREAMS = 4  # for attention of heads with other scales
# what attends at a `scale`, and the tensors that it takes: Q [1, H, T, D], then K and V [1, K, N, D] in pairs
Attention = tuple[Callable[..., Tensor], list[Tensor]]
_STEP = 256  # tokens that cuDNN is given are a multiple of these


class Prompt(NamedTuple):
    """New tokens of a sequence that attend to `first` .. `end - 1`, the last of them the last token."""

    seq: int
    start: int  # in the query
    stop: int
    first: int
    end: int

    @property
    def pairs(self) -> int:
        """Pairs of a query and a position that it sees."""
        new, length = self.stop - self.start, self.end - self.first
        return new * (2 * length - new + 1) // 2


def find_prompts(
    query: Tensor, blocks: KVBlocks, sequences: PagedSequences, cu_seqlens: Tensor, max_query_len: int,
    options: AttentionOptions, least_pairs: int,
) -> list[Prompt]:  # fmt: skip
    """Return what torch's attention is to compute; empty: it cannot, or is not worth its launches.

    `query` is [T, H, D], `cu_seqlens` [S + 1] int32. Lengths are read from the device where the host does not
    know them. A graph that is being recorded may be replayed with others.
    """
    longest = sequences.block_tables.shape[1] * blocks.layout.block_size
    least_pairs *= blocks.layout.num_kv_heads if blocks.layout.k_scales else 1  # a call each
    if query.shape[0] * longest * query.shape[1] < least_pairs or not _fits(query, blocks, options):
        return []
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return []
    spans = sequences.spans()
    if options.sliding_window is not None and options.sliding_window < max(end for _, end in spans):
        return []
    if len(query) == len(spans) * max_query_len:
        ends = list(range(0, len(query) + 1, max_query_len))
    else:
        ends = cu_seqlens.tolist()
    # tokens before a sequence's first position, as left padding has, see nothing
    prompts = [
        Prompt(seq, max(ends[seq], ends[seq + 1] - (end - first)), ends[seq + 1], first, end)
        for seq, (first, end) in enumerate(spans)
    ]
    prompts = [prompt for prompt in prompts if prompt.start < prompt.stop]
    has_earlier = [p.end - p.first > p.stop - p.start for p in prompts]
    least = sum(least_pairs * (_AFTER if earlier else 1) for earlier in has_earlier)
    return prompts if sum(prompt.pairs for prompt in prompts) * query.shape[1] >= least else []


def _fits(query: Tensor, blocks: KVBlocks, options: AttentionOptions) -> bool:
    """Return whether torch has this attention, and 16 bits hold all of it; `query` is [T, H, D]."""
    plain = options.softcap is None and options.sinks is None and options.q_scale is None
    holds = query.dtype == torch.float16 or (query.dtype == torch.bfloat16 and blocks.format != "float16")
    return plain and holds and blocks.layout.k_scales < 2 and query.shape[2] % 8 == 0


@torch.no_grad()
def attend_densely(
    query: Tensor, blocks: KVBlocks, sequences: PagedSequences, options: AttentionOptions,
    prompts: list[Prompt], out: Tensor,
) -> None:  # fmt: skip
    """Attend from `query` [T, H, D] with torch's attention and write `out` [T, H, D]: 0 beside prompts."""
    if sum(prompt.stop - prompt.start for prompt in prompts) < query.shape[0]:
        out.zero_()
    group, scales, dtype = query.shape[1] // blocks.num_kv_heads, blocks.k_scale_values, query.dtype
    softmax_scale = options.scale(query.shape[2])
    v_scale = per_channel(blocks.v_scale).expand(blocks.num_kv_heads, 1, -1).repeat_interleave(group, 0)[None]
    by_head, rows = query.transpose(0, 1)[None], out.transpose(0, 1)[None]  # [1, H, T, D]
    for prompt in prompts:
        tokens, positions = slice(prompt.start, prompt.stop), slice(prompt.first, prompt.end)
        # as many KV heads at a time as fit the workspace, or one
        size = max(1, WORKSPACE // (4 * (prompt.end - prompt.first) * blocks.head_dim))
        for first in range(0, blocks.num_kv_heads, size):
            heads = slice(first, min(first + size, blocks.num_kv_heads))
            queries = slice(heads.start * group, heads.stop * group)
            # in one call, or in one for each KV head with a scale of its own
            of_calls = [softmax_scale * scale for scale in (scales[heads] if len(scales) > 1 else scales)]
            _attend_to_heads(
                by_head[:, queries, tokens], gather(blocks, sequences, prompt.seq, heads, positions, dtype),
                of_calls, v_scale[:, queries], rows[:, queries, tokens],
            )  # fmt: skip


def _attend_to_heads(
    query: Tensor, key_value: Tensor, scales: list[float], v_scale: Tensor, out: Tensor
) -> None:
    """Attend from `query` [1, H, T, D] to K and V [2, K, N, D] and write `out`, in a call for each scale.

    All that heads share is done before, once: Python's operations take about as long as a head's kernels.
    """
    key, value = key_value[:, None]
    attend, inputs = (_cudnn if _prefers_cudnn(query, key, value) else _torch)(query, key, value)
    parts = (x.chunk(len(scales), 1) for x in (out, v_scale, *inputs))
    calls = list(zip(scales, *parts, strict=True))

    def run(scale: float, part: Tensor, v_scale: Tensor, *inputs: Tensor) -> None:
        torch.mul(attend(*inputs, scale=scale), v_scale, out=part)

    _run_side_by_side(run, calls, query.device)


def _run_side_by_side(
    run: Callable[..., None], calls: Sequence[tuple[Any, ...]], device: torch.device
) -> None:
    """Call `run` for each of `calls`: those of a head, which alone do not fill a GPU, on several streams."""
    if len(calls) == 1 or device.type != "cuda":
        for call in calls:
            run(*call)
        return
    current, streams = torch.cuda.current_stream(device), _streams(device)[: len(calls)]
    start = current.record_event()  # of this thread alone, as others' work goes to the same streams
    for stream, _ in streams:
        stream.wait_event(start)
    try:
        for call, (stream, _) in zip(calls, itertools.cycle(streams), strict=False):
            torch.cuda.set_stream(stream)  # `with torch.cuda.stream` sets three, one after the other
            run(*call)
    finally:
        torch.cuda.set_stream(current)
        for stream, end in streams:
            end.record(stream)
            current.wait_event(end)


def _torch(query: Tensor, key: Tensor, value: Tensor) -> Attention:
    """Return what torch chooses, for `query` [1, H, T, D], `key` and `value` [1, K, N, D]."""
    mask = causal_lower_right(query.shape[2], key.shape[2])
    attend = functools.partial(scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
    return attend, [query, key, value]


def _prefers_cudnn(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether cuDNN has this attention and is the fastest: on NVIDIA since Hopper."""
    if not query.is_cuda or torch.version.hip or torch.cuda.get_device_capability(query.device)[0] < 9:
        return False
    return can_use_cudnn_attention(SDPAParams(query, key, value, None, 0.0, True, True))


def _cudnn(query: Tensor, key: Tensor, value: Tensor) -> Attention:
    """Return cuDNN's attention, for `query` [1, H, T, D], `key` and `value` [1, K, N, D].

    cuDNN plans every new shape for tens of milliseconds, so tokens are filled up to one of few numbers.
    Its causal mask begins at the first position: what all queries see is attended to by itself, and the
    two softmaxes are joined.
    """
    new, length = query.shape[2], key.shape[2]
    step = max(_STEP, triton.next_power_of_2(new) // 32)
    shared = (length - new) // step * step
    front = length - new - shared  # positions that are neither: queries before them are not used
    behind = -(front + new) % step
    inputs = [query, key[:, :, shared:], value[:, :, shared:]]
    if front or behind:
        inputs = [pad(x, (0, 0, at, behind)) for x, at in zip(inputs, (front, 0, 0), strict=True)]
    if shared:
        inputs += [key[:, :, :shared], value[:, :, :shared]]
    return functools.partial(_attend_with_cudnn, front=front, new=new), inputs


def _attend_with_cudnn(
    query: Tensor, key: Tensor, value: Tensor, *earlier: Tensor, scale: float, front: int, new: int
) -> Tensor:
    """Attend [1, H, T, D] from the `new` tokens behind `front` others; all see `earlier` K and V."""
    out, sums = cudnn(query, key, value, scale, True)
    if earlier:
        before, before_sums = cudnn(query, earlier[0], earlier[1], scale, False)
        sums, before_sums = (x.view(*out.shape[:3], 1) for x in (sums, before_sums))
        out = out * torch.sigmoid(sums - before_sums) + before * torch.sigmoid(before_sums - sums)
    return out if out.shape[2] == new else out[:, :, front : front + new]


def cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return cuDNN's attention [1, H, T, D], and the logarithms of its rows' sums.

    `query` is [1, H, T, D], `key` and `value` are [1, K, N, D].
    The sums are [1, H, T, 1]; in older versions of torch [1, H, T].
    """
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, sums, *_ = attend(query, key, value, None, True, 0.0, is_causal, scale=scale)
    return out, sums


@functools.cache
def _streams(device: torch.device) -> list[tuple[torch.cuda.Stream, torch.cuda.Event]]:
    return [(torch.cuda.Stream(device), torch.cuda.Event()) for _ in range(_STREAMS)]


def gather(
    blocks: KVBlocks, sequences: PagedSequences, seq: int, heads: slice, tokens: slice, dtype: torch.dtype
) -> Tensor:
    """Return K and V of some heads and tokens of a sequence as `dtype`, without scales: [2, heads, N, D]."""
    first, end, tables = tokens.start, tokens.stop, sequences.block_tables
    codes = blocks.codes if blocks.format == "float16" else blocks.codes.view(torch.int16)
    shape = (2, heads.stop - heads.start, end - first, blocks.head_dim)
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    target = current_target()
    tile, launcher = gather_launcher(blocks.layout, target)
    tiles = triton.cdiv(end - first // tile * tile, tile)
    launcher(
        target, (tiles, shape[1], 2), blocks, (out, tables),
        (codes, tables, out, blocks.num_blocks, seq, heads.start, first, end,
         tables.stride(0)),
    )  # fmt: skip
    return out


@functools.cache
def gather_launcher(blocks: BlocksLayout, target: Target) -> tuple[int, Launcher]:
    """Return the positions that a program takes, and the kernel, for a layer."""
    block_d = max(64, triton.next_power_of_2(blocks.head_dim))
    layer = block_constants(blocks, target, block_d=block_d, ptx=target.backend == "cuda")
    constants = {"LAYER": layer, "TILE": _VALUES // block_d}
    return constants["TILE"], Launcher(gather_kernel, constants, num_warps=4)


@triton.jit(do_not_specialize=("num_blocks", "seq", "first_head", "first", "end", "stride_block_tables"))
def gather_kernel(
    codes_ptr: tl.tensor, block_tables_ptr: tl.tensor, out_ptr: tl.tensor, num_blocks: tl.tensor,
    seq: tl.tensor, first_head: tl.tensor, first: tl.tensor, end: tl.tensor, stride_block_tables: tl.tensor,
    LAYER: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Decode TILE positions of a head's K (third program id 0) or V (1): one program.

    It writes `out` [2, heads, end - first, D], whose heads begin with `first_head`.
    """
    start = first // TILE * TILE + tl.program_id(0) * TILE
    head, part = tl.program_id(1), tl.program_id(2).to(tl.int64)
    positions = start + tl.arange(0, TILE)
    inside = (positions >= first) & (positions < end)
    block_table_ptr = block_tables_ptr + tl.cast(seq, tl.int64) * stride_block_tables
    rows = row_offsets(block_table_ptr, start, positions, inside, first_head + head, LAYER, TILE)
    rows += part * num_blocks * LAYER.num_kv_heads * LAYER.block_size  # V lies behind K
    first_half, second_half = decode_tile(load_codes(codes_ptr, rows, inside, LAYER), LAYER)
    values = join_halves(first_half, second_half, LAYER) * decode_unit(LAYER.format, LAYER.hardware)
    if out_ptr.dtype.element_ty != tl.float16:
        values = values.to(tl.float32)
    channels = tl.arange(0, LAYER.block_d)
    at = (part * tl.num_programs(1) + head) * (end - first) + positions - first
    pointers = out_ptr + at[:, None] * LAYER.head_dim + channels[None, :]
    valid = inside[:, None] & (channels < LAYER.head_dim)[None, :]
    tl.store(pointers, values.to(out_ptr.dtype.element_ty), mask=valid)
