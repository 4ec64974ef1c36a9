"""Check transformers' masks against the kernels' own: causal, window, left padding."""

import torch
from torch import Tensor

from fp8kv_runtime.errors import AttentionError


def left_padding(mask: Tensor) -> Tensor | None:
    """Padding tokens before each row's first token, [B] int32, of a mask [B, T]; None: no padding.

    Padding elsewhere is not represented; `check_mask` finds it.
    """
    visible = mask.bool()
    if visible.all():
        return None
    return (visible.cumsum(1) == 0).sum(1).to(torch.int32)


def check_mask(mask: Tensor, num_tokens: int, starts: Tensor | None, window: int | None) -> None:
    """Check that a model's mask is the one the kernels apply.

    Args:
        mask: [B, T] bool, or [B, 1, T, N] bool or additive, for T new of N tokens.
        num_tokens: T.
        starts: width of each row's left padding, [B].
        window: sliding window in tokens.

    Raises:
        AttentionError: it differs, as for packed sequences, images or right padding.
    """
    length = mask.shape[-1]
    columns = torch.arange(length, device=mask.device)
    first = torch.zeros(1, device=mask.device) if starts is None else starts.to(mask.device)
    if mask.dim() == 2:
        is_ours = torch.equal(mask.bool(), (columns >= first[:, None]).expand_as(mask))
    else:
        visible = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0]
        rows = torch.arange(length - num_tokens, length, device=mask.device)[:, None]
        expected = (columns <= rows) & (columns >= first[:, None, None])
        if window is not None:
            expected &= columns > rows - window
        matters = rows >= first[:, None, None]  # padding may attend to anything
        is_ours = torch.equal(visible & matters, (expected & matters).expand_as(visible))
    if not is_ours:
        raise AttentionError(
            "the Triton kernels apply causal masks with a sliding window and left padding; this "
            "model or input needs another one. Pad on the left, or use the torch backend"
        )
