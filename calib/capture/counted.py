"""Which tokens of a batch the statistics count, where they lie, and what is kept of each place."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.data import Batch
from calib.scales.curve import buckets_of
from calib.scales.places import BUCKETS, POSITION_BUCKETS
from calib.scales.tail import largest as largest_of


@dataclass(frozen=True)
class Counted:
    """The N tokens of a batch that are counted, and in which of `calib.scales.places`."""

    rows: Tensor | None  # [N] int64, among the batch's B * T; None: all of them
    read: int  # how many are real, counted or not
    buckets: Tensor  # [N] int64, by index in the run
    positions: Tensor  # [N] int64, by position in the sample

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.buckets)

    def to(self, device: torch.device) -> "Counted":
        """The same on `device`."""
        rows = None if self.rows is None else self.rows.to(device)
        return Counted(rows, self.read, self.buckets.to(device), self.positions.to(device))


def counted(batch: Batch) -> Counted:
    """Leave out padding and the first `skip_first` tokens of each sample of `batch`."""
    real = batch.attention_mask.bool()
    positions = torch.arange(real.shape[1], device=real.device).expand_as(real)
    kept = real & (positions >= batch.skip_first)
    indices = batch.first_token + real.flatten().cumsum(0).view_as(real) - 1
    rows = None if bool(kept.all()) else kept.flatten().nonzero().squeeze(-1)
    of_sample = buckets_of(positions[kept]).clamp(max=POSITION_BUCKETS - 1)
    return Counted(rows, batch.num_tokens, buckets_of(indices[kept]), of_sample)


def per_token_statistics(magnitudes: Tensor, tokens: Counted) -> dict[str, Tensor]:
    """Fields of `TensorStats` that come of each token's largest magnitude, of [N, H, D]."""
    heads = magnitudes.amax(-1).t()  # [H, N]

    def by(buckets: Tensor, count: int) -> Tensor:
        table = heads.new_zeros(len(heads), count)
        return table.scatter_reduce_(1, buckets.expand_as(heads), heads, "amax")

    return {
        "curve": by(tokens.buckets, BUCKETS),
        "positions": by(tokens.positions, POSITION_BUCKETS),
        "tail": largest_of(heads, heads[:, :0]),
    }
