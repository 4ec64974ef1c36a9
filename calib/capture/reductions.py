"""Reductions of a batch of K, V or Q [N, H, D]: a CPU and a GPU do them differently, with the same result."""

import math

import torch
from torch import Tensor
from torch.linalg import vector_norm

from calib.scales.observers import NUM_BINS, bin_indices


class CpuReductions:
    """Reductions that keep to the cache of a CPU."""

    def amax(self, x: Tensor, *, with_tokens: bool) -> tuple[Tensor, Tensor | None]:
        """Return the largest of |x| [N, H, D] by channel, [H, D], and, `with_tokens`, by token, [H, N]."""
        magnitudes = x.flatten(1).abs()
        tokens = magnitudes.view(x.shape).amax(-1).t() if with_tokens else None
        # reducing over the leading dimension is what a CPU does at full width
        return magnitudes.amax(0).view(x.shape[1:]), tokens

    def bucket_amax(self, heads: Tensor, buckets: Tensor, count: int) -> Tensor:
        """Reduce `heads` [H, N], not negative, by max to the `buckets` [N] of its tokens: [H, count]."""
        return heads.new_zeros(len(heads), count).scatter_reduce_(1, buckets.expand_as(heads), heads, "amax")

    def histogram(self, x: Tensor) -> Tensor:
        """Count the magnitudes of each head of `x` [N, H, D]: [H, NUM_BINS] int64."""
        # head by head: bincount wants int64, and eight times the input would leave the CPU's cache
        bins = (bin_indices(head).long().flatten() for head in x.unbind(1))
        return torch.stack([torch.bincount(indices, minlength=NUM_BINS) for indices in bins])


class GpuReductions:
    """Reductions that read nothing back; maxima are made without atomics."""

    def amax(self, x: Tensor, *, with_tokens: bool) -> tuple[Tensor, Tensor | None]:
        """Return the largest of |x| [N, H, D] by channel, [H, D], and, `with_tokens`, by token, [H, N]."""
        tokens = vector_norm(x, math.inf, dim=-1).t() if with_tokens else None
        return vector_norm(x, math.inf, dim=0), tokens  # x is read, and |x| is never written

    def bucket_amax(self, heads: Tensor, buckets: Tensor, count: int) -> Tensor:
        """Reduce `heads` [H, N], not negative, by max to the `buckets` [N] of its tokens: [H, count]."""
        members = buckets == torch.arange(count, device=heads.device)[:, None]
        return torch.where(members, heads[:, None], 0).amax(-1)

    def histogram(self, x: Tensor) -> Tensor:
        """Count the magnitudes of each head of `x` [N, H, D]: [H, NUM_BINS] int64."""
        counts = torch.zeros(x.shape[1], NUM_BINS, dtype=torch.int32, device=x.device)
        one = counts.new_ones(())
        # head by head: int64 indices are four times the input; bincount would read the largest of them back
        for row, head in zip(counts, x.unbind(1), strict=True):
            bins = bin_indices(head).long().flatten()
            row.scatter_add_(0, bins, one.expand_as(bins))
        return counts.long()


Reductions = CpuReductions | GpuReductions


def reductions_on(device: torch.device) -> Reductions:
    """Return the reductions that are fast on `device`."""
    return CpuReductions() if device.type == "cpu" else GpuReductions()
