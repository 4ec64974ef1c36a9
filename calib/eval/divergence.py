"""Per token: how far a variant's next-token distribution is from the reference's."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_POSITIONS = 64  # at a time: the vocabulary is large


@dataclass(frozen=True)
class Divergence:
    """One document, one variant. Positions are those of the tokens read."""

    kl: Tensor  # [T] float64, KL(reference || variant) in nats
    agrees: Tensor  # [T] bool, the likeliest token is the same
    nll: Tensor  # [T - 1] float64, of the text under the variant, in nats


def compare(reference: Tensor, variant: Tensor, token_ids: Tensor) -> Divergence:
    """Compare logits [T, vocabulary] of the same tokens [T]."""
    kl, agrees, nll = [], [], []
    for rows in _chunks(len(token_ids)):
        # in float32 the sum over a vocabulary is off by 1e-7, as much as a good cache differs
        expected = reference[rows].double().log_softmax(-1)
        found = variant[rows].double().log_softmax(-1)
        # rounding can leave a sum of equal distributions a little below 0
        kl.append((expected.exp() * (expected - found)).sum(-1).clamp(min=0))
        agrees.append(expected.argmax(-1) == found.argmax(-1))
        following = token_ids[rows.start + 1 : rows.stop + 1].to(found.device)
        nll.append(-found[: len(following)].gather(1, following[:, None]).squeeze(1))
    return Divergence(torch.cat(kl).cpu(), torch.cat(agrees).cpu(), torch.cat(nll).cpu())


def _chunks(length: int) -> Iterator[slice]:
    return (slice(i, min(i + _POSITIONS, length)) for i in range(0, length, _POSITIONS))
