"""Which tokens of a batch the statistics count, where they lie, and what is kept of each place."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.data import Batch
from calib.scalefiles.places import BUCKETS, POSITION_BUCKETS
from calib.scales.curve import buckets_of
from calib.scales.tail import largest as largest_of


@dataclass(frozen=True)
class Counted:
    """The N tokens of a batch that are counted, and the buckets that hold any of them.

    Columns are buckets as in `calib.scalefiles.places`: by index, and from BUCKETS on by position.
    """

    rows: Tensor | None  # [N] int64, among the batch's B * T; None: all of them
    tokens: int  # N
    read: int  # those that are real, counted or not
    columns: Tensor  # [U] int64
    members: Tensor  # [U, N] bool

    def to(self, device: torch.device) -> "Counted":
        """The same on `device`."""
        rows = None if self.rows is None else self.rows.to(device)
        columns, members = self.columns.to(device), self.members.to(device)
        return replace(self, rows=rows, columns=columns, members=members)


def counted(batch: Batch) -> Counted:
    """Leave out padding and the first `skip_first` tokens of each sample of `batch`."""
    real = batch.attention_mask.bool()
    positions = torch.arange(real.shape[1], device=real.device).expand_as(real)
    kept = real & (positions >= batch.skip_first)
    indices = batch.first_token + real.flatten().cumsum(0).view_as(real) - 1
    places = (
        buckets_of(indices[kept]),
        BUCKETS + buckets_of(positions[kept]).clamp(max=POSITION_BUCKETS - 1),
    )
    columns = [torch.unique(each) for each in places]
    members = [place == column[:, None] for place, column in zip(places, columns, strict=True)]
    rows = None if bool(kept.all()) else kept.flatten().nonzero().squeeze(-1)
    tokens = len(places[0])
    return Counted(rows, tokens, batch.num_tokens, torch.cat(columns), torch.cat(members))


def per_token_statistics(largest: Tensor, tokens: Counted) -> dict[str, Tensor]:
    """Fields of `TensorStats` that come of each token's largest magnitude, `largest` [N, H]."""
    zero = largest.new_zeros(())
    inside = torch.where(tokens.members[:, None], largest.t().contiguous(), zero)  # [U, H, N]
    table = largest.new_zeros(largest.shape[1], BUCKETS + POSITION_BUCKETS)
    table.index_copy_(1, tokens.columns, inside.amax(-1).t())
    return {
        "curve": table[:, :BUCKETS].contiguous(),
        "positions": table[:, BUCKETS:].contiguous(),
        "tail": largest_of(largest.t(), largest.new_empty(largest.shape[1], 0)),
    }
