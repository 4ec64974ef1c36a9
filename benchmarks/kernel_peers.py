"""16-bit attention of others, on the same values and queries; what is not installed is left out."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
from kernel_cases import Case, Inputs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from fp8kv_runtime.fp8 import dequantize

Attention = Callable[[], Tensor]  # [T, H, D], or a view of it with more dimensions

_BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
}


def peers(case: Case, inputs: Inputs) -> dict[str, Callable[[], Attention]]:
    """What to try on this case, by name; preparing or running raises where a shape is refused."""
    if case.kernel == "append_kv":
        return {}
    found: dict[str, Callable[[], Attention]] = {}
    if len(set(case.lengths)) == 1:  # contiguous K and V have one length
        key, value = contiguous(case, inputs)
        for name, backend in _BACKENDS.items():
            found[name] = partial(sdpa, case, inputs, key, value, backend)
        if (library := _try_import("flash_attn")) is not None:
            found["flash-attn"] = partial(_flash_attn, library, case, inputs, key, value)
    if case.kernel == "decode_attention" and (library := _try_import("flashinfer")) is not None:
        found["FlashInfer"] = partial(_flashinfer, library, case, inputs)
    return found


def contiguous(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """K and V as 16-bit caches without blocks hold them: 2 x [S, K, N, D]."""
    dense = inputs.blocks.dense(inputs.sequences.block_tables, max(case.lengths))
    key, value = (x.half().contiguous() for x in dense)
    return key, value


def sdpa(case: Case, inputs: Inputs, key: Tensor, value: Tensor, backend: SDPBackend) -> Attention:
    """One backend of torch's own attention."""
    query = inputs.query.unflatten(0, (-1, case.new)).transpose(1, 2).contiguous()
    mask = causal_lower_right(case.new, key.shape[2]) if case.new > 1 else None

    def run() -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def _flash_attn(
    library: ModuleType, case: Case, inputs: Inputs, key: Tensor, value: Tensor
) -> Attention:
    query = inputs.query.unflatten(0, (-1, case.new))
    # [S, N, K, D]
    key, value = (x.transpose(1, 2).contiguous() for x in (key, value))
    return lambda: library.flash_attn_with_kvcache(
        query, key, value, cache_seqlens=inputs.sequences.seq_lens, causal=True
    )


def _flashinfer(library: ModuleType, case: Case, inputs: Inputs) -> Attention:
    blocks, sequences = inputs.blocks, inputs.sequences
    pages = dequantize(blocks.codes, blocks.scales[:, None]).half()  # [2, blocks, K, size, D]
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


def _try_import(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None
