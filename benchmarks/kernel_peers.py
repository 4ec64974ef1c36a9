"""Attention of others, on the same values and queries; what is not installed is left out."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from calib.bench.kernels import Case, Inputs

Attention = Callable[[], Tensor]  # [T, H, D], or a view of it with more dimensions
Prepare = Callable[[], Attention]

_BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
}


def dense_peers(case: Case, inputs: Inputs) -> dict[str, Prepare]:
    """16-bit attention to K and V that lie in one piece; preparing or running may refuse."""
    if case.kernel == "append_kv" or len(set(case.lengths)) > 1:
        return {}
    key, value = contiguous(case, inputs)
    found: dict[str, Prepare] = {
        name: partial(sdpa, case, inputs, key, value, backend) for name, backend in _BACKENDS.items()
    }
    if case.quick and inputs.query.is_cuda:  # it is compiled anew for every shape
        found["FlexAttention"] = partial(flex, case, inputs, key, value, torch.compile)
    if (library := try_import("flash_attn")) is not None:
        found["flash-attn"] = partial(_flash_attn, library, case, inputs, key, value)
    return found


def contiguous(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """K and V as 16-bit caches without blocks hold them: 2 x [S, K, N, D]."""
    dense = inputs.blocks.dense(inputs.sequences.block_tables, max(case.lengths))
    key, value = (x.half().contiguous() for x in dense)
    return key, value


def sdpa(case: Case, inputs: Inputs, key: Tensor, value: Tensor, backend: SDPBackend) -> Attention:
    """One backend of torch's own attention to K and V [S, K, N, D]."""
    query = _by_head(case, inputs)
    mask = causal_lower_right(case.new, key.shape[2]) if case.new > 1 else None

    def run() -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def flex(
    case: Case, inputs: Inputs, key: Tensor, value: Tensor,
    compiled: Callable[..., Callable[..., Tensor]],
) -> Attention:  # fmt: skip
    """FlexAttention to K and V [S, K, N, D], as `compiled` makes it."""
    query = _by_head(case, inputs)
    mask = None
    if case.new > 1:
        first = key.shape[2] - case.new
        sizes = (None, None, case.new, key.shape[2])
        mask = create_block_mask(lambda b, h, q, k: first + q >= k, *sizes, device=query.device)
    attention = compiled(flex_attention, dynamic=False)
    return lambda: attention(query, key, value, block_mask=mask, enable_gqa=True).transpose(1, 2)


def try_import(name: str) -> ModuleType | None:
    """Import a library, if it is there."""
    try:
        return import_module(name)
    except ImportError:
        return None


def _by_head(case: Case, inputs: Inputs) -> Tensor:
    return inputs.query.unflatten(0, (-1, case.new)).transpose(1, 2).contiguous()


def _flash_attn(library: ModuleType, case: Case, inputs: Inputs, key: Tensor, value: Tensor) -> Attention:
    query = inputs.query.unflatten(0, (-1, case.new))
    # [S, N, K, D]
    key, value = (x.transpose(1, 2).contiguous() for x in (key, value))
    return lambda: library.flash_attn_with_kvcache(
        query, key, value, cache_seqlens=inputs.sequences.seq_lens, causal=True
    )
