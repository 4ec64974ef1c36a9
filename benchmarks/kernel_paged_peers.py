"""Attention of others to a cache in blocks, in 16 bits and in FP8; see `kernel_peers.py`."""

from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from kernel_peers import Attention, Prepare, try_import
from torch import Tensor

from calib.bench.kernels import Case, Inputs
from fp8kv_runtime.fp8 import dequantize

_SEGMENTS = 16  # what vLLM splits a sequence's KV into
_VLLM = "vllm.v1.attention.ops.triton_unified_attention"


def paged_peers(case: Case, inputs: Inputs) -> dict[str, Prepare]:
    """16-bit attention to the same blocks; preparing or running may refuse."""
    found: dict[str, Prepare] = {}
    if case.kernel == "append_kv":
        return found
    if case.kernel == "decode_attention" and (library := try_import("flashinfer")) is not None:
        found["FlashInfer"] = partial(_flashinfer, library, case, inputs)
    if (library := try_import("flash_attn_interface")) is not None:
        found["FlashAttention 3"] = partial(_flash_attention_3, library, case, inputs)
    if (library := try_import(_VLLM)) is not None:
        found["vLLM Triton"] = partial(vllm_triton, library, case, inputs)
    return found


def fp8_peers(case: Case, inputs: Inputs) -> dict[str, Prepare]:
    """Attention to the same FP8 blocks, for inputs `per_tensor`."""
    if case.kernel == "append_kv" or (library := try_import(_VLLM)) is None:
        return {}
    return {"vLLM Triton, FP8": partial(vllm_triton, library, case, inputs, fp8=True)}


def per_tensor(inputs: Inputs) -> Inputs:
    """Return the same codes with one scale for all heads, which is all that others take."""
    scales = {n: getattr(inputs.blocks, n).mean().view(1) for n in ("k_scale", "v_scale")}
    return replace(inputs, blocks=replace(inputs.blocks, **scales))


def pages_of(inputs: Inputs) -> Tensor:
    """K and V in 16 bits: [2, blocks, K, block_size, D]."""
    return dequantize(inputs.blocks.codes, inputs.blocks.scales).half()


def vllm_triton(library: ModuleType, case: Case, inputs: Inputs, *, fp8: bool = False) -> Attention:
    """vLLM's Triton kernel, launched as its Triton backend does."""
    blocks, device = inputs.blocks, inputs.query.device
    # [blocks, block_size, K, D]
    stored = (blocks.codes if fp8 else pages_of(inputs)).transpose(2, 3).contiguous()
    out = torch.empty_like(inputs.query)
    most = max(1, 128 // case.num_kv_heads)  # sequences that are split
    segments = (most, case.num_heads, _SEGMENTS)
    width = 1 << (case.head_dim - 1).bit_length()
    per_head = (len(case.lengths), case.num_kv_heads)
    scales = [s.expand(per_head) for s in (blocks.k_scale, blocks.v_scale)]
    arguments = {
        "q": inputs.query, "k": stored[0], "v": stored[1], "out": out,
        "cu_seqlens_q": inputs.cu_seqlens, "max_seqlen_q": case.new,
        "seqused_k": inputs.sequences.seq_lens, "max_seqlen_k": max(case.lengths),
        "softmax_scale": case.head_dim**-0.5, "causal": True, "window_size": (-1, -1),
        "block_table": inputs.sequences.block_tables, "softcap": 0, "q_descale": None,
        "k_descale": scales[0] if fp8 else None, "v_descale": scales[1] if fp8 else None,
        "seq_threshold_3D": most, "num_par_softmax_segments": _SEGMENTS,
        "softmax_segm_output": torch.empty(*segments, width, device=device),
        "softmax_segm_max": torch.empty(segments, device=device),
        "softmax_segm_expsum": torch.empty(segments, device=device),
    }  # fmt: skip
    if fp8:
        arguments["kv_quant_mode"] = library.KVQuantMode.FP8_PER_TENSOR

    def run() -> Tensor:
        library.unified_attention(**arguments)
        return out

    return run


def _flash_attention_3(library: ModuleType, case: Case, inputs: Inputs) -> Attention:
    query = inputs.query.unflatten(0, (-1, case.new))
    pages = pages_of(inputs).transpose(2, 3).contiguous()  # [2, blocks, block_size, K, D]
    sequences = inputs.sequences

    def run() -> Tensor:
        out = library.flash_attn_with_kvcache(
            query, pages[0], pages[1], cache_seqlens=sequences.seq_lens,
            page_table=sequences.block_tables.clamp(min=0), causal=True,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return run


def _flashinfer(library: ModuleType, case: Case, inputs: Inputs) -> Attention:
    pages, sequences = pages_of(inputs), inputs.sequences
    device = pages.device
    workspace = torch.empty(2**27, dtype=torch.uint8, device=device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    starts = torch.tensor([0, *(-(-n // case.block_size) for n in case.lengths)])
    last = torch.tensor([(n - 1) % case.block_size + 1 for n in case.lengths])

    def run() -> Tensor:
        return wrapper.run(inputs.query, (pages[0], pages[1]))

    wrapper.plan(
        starts.cumsum(0).to(device, torch.int32),
        sequences.block_tables[sequences.block_tables >= 0],
        last.to(device, torch.int32),
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        case.block_size,
        q_data_type=torch.float16,
        kv_data_type=torch.float16,
    )
    return run
