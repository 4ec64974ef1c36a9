"""Per token: how far a variant's next-token distribution is from the reference's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_POSITIONS = 16  # at a time: rows of a large vocabulary stay in a processor's cache


@dataclass(frozen=True)
class Divergence:
    """One document, one variant. Positions are those of the tokens read."""

    kl: Tensor  # [T] float32, KL(reference || variant) in nats
    agrees: Tensor  # [T] bool, the likeliest token is the same
    nll: Tensor  # [T - 1] float32, of the text under the variant, in nats


def compare(reference: Tensor, variant: Tensor, following: Tensor) -> Divergence:
    """Compare logits [T, vocabulary]; `following` [T or T - 1] are the tokens that came next."""
    kl, agrees, nll = [], [], []
    for rows in chunks(len(reference), _POSITIONS):
        expected, found = reference[rows].float(), variant[rows].float()
        kl.append(divergence(expected, found))
        agrees.append(expected.argmax(-1) == found.argmax(-1))
        came = following[rows].to(found.device)
        chosen = found[: len(came)].gather(1, came[:, None]).squeeze(1)
        nll.append(found[: len(came)].logsumexp(-1) - chosen)
    return Divergence(torch.cat(kl).cpu(), torch.cat(agrees).cpu(), torch.cat(nll).cpu())


def join(parts: Sequence[Divergence]) -> Divergence:
    """Consecutive parts of one document as one."""
    return Divergence(
        torch.cat([part.kl for part in parts]),
        torch.cat([part.agrees for part in parts]),
        torch.cat([part.nll for part in parts]),
    )


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    """KL of the softmax of two logits [T, vocabulary] float32: [T] nats.

    Taken from the differences of the logits, log Σ p e^d - Σ p d with d free of its mean: the
    difference of two log-softmaxes would be off by 1e-7, as much as a good cache differs.
    """
    p = expected.softmax(-1)
    d = found - expected
    d -= (p * d).sum(-1, keepdim=True)
    shift = (p * d).sum(-1)  # what rounding left of the mean
    return ((p * d.expm1()).sum(-1).log1p() - shift).clamp(min=0)


def chunks(length: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `length`."""
    return (slice(i, min(i + size, length)) for i in range(0, length, size))
