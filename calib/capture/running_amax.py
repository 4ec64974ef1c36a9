"""Running statistics on the model's device: where amax is taken, and of which tokens of a batch."""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.capture.attention import CachedAttention
from calib.capture.reductions import Reductions, reductions_on
from calib.data import Batch
from calib.scales.places import BUCKETS, POSITION_BUCKETS
from calib.scales.stats import MODALITIES, STATISTICS, LayerStats, TensorStats, bucket_indices
from calib.scales.tail import count_ties, largest

_GRID = 2.0**20


@dataclass(frozen=True)
class CountedTokens:
    """The N tokens of a batch that are counted, each with its buckets (see `calib.scales.places`)."""

    rows: Tensor | None  # [N] int64, among the batch's B * T; None: all of them
    read: int  # real tokens, counted or not
    buckets: Tensor  # [N] int64, bucket of the index in the run
    positions: Tensor  # [N] int64, bucket of the position in the sample
    modalities: Tensor | None = None  # [N] int64, index in MODALITIES

    def to(self, device: torch.device) -> "CountedTokens":
        """Return the same on `device`."""
        rows = None if self.rows is None else self.rows.to(device)
        modalities = None if self.modalities is None else self.modalities.to(device)
        buckets, positions = self.buckets.to(device), self.positions.to(device)
        return CountedTokens(rows, self.read, buckets, positions, modalities)


def count_tokens(batch: Batch) -> CountedTokens:
    """Return which tokens of `batch` are counted: no padding, and not the first `skip_first` of a sample."""
    real = batch.attention_mask.bool()
    positions = torch.arange(real.shape[1], device=real.device).expand_as(real)
    counted = real & (positions >= batch.skip_first)
    indices = batch.first_token + real.flatten().cumsum(0).view_as(real) - 1
    rows = None if bool(counted.all()) else counted.flatten().nonzero().squeeze(-1)
    position_buckets = bucket_indices(positions[counted]).clamp(max=POSITION_BUCKETS - 1)
    buckets = bucket_indices(indices[counted])
    modalities = batch.media.modalities.to(real.device)[None][counted] if batch.media else None
    return CountedTokens(rows, batch.num_tokens, buckets, position_buckets, modalities)


def per_token_statistics(heads: Tensor, tokens: CountedTokens, reduce: Reductions) -> dict[str, Tensor]:
    """Return the fields of `TensorStats` made of `heads` [H, N], the largest magnitude of each token."""
    statistics = {
        "curve": reduce.bucket_amax(heads, tokens.buckets, BUCKETS),
        "positions": reduce.bucket_amax(heads, tokens.positions, POSITION_BUCKETS),
        "tail": largest(heads, heads[:, :0]),
        "ties": count_ties(heads),
    }
    if tokens.modalities is not None:
        statistics["modalities"] = reduce.bucket_amax(heads, tokens.modalities, len(MODALITIES))
    return statistics


class RunningTensor:
    """Statistics so far of one of K, V or Q in one attention module: `fields` of `TensorStats`, and amax."""

    def __init__(self, fields: Set[str]) -> None:
        self._fields = fields
        self._values: dict[str, Tensor] = {}  # in the model's dtype

    @property
    def amax(self) -> Tensor | None:
        """The largest magnitudes so far, [H, D]; None before the first batch."""
        return self._values.get("amax")

    def update(self, x: Tensor, tokens: CountedTokens) -> None:
        """Add `x` [N, H, D]: K, V or Q of the N `tokens`."""
        reduce = reductions_on(x.device)
        amax, heads = reduce.amax(x, with_tokens="tail" in self._fields)
        batch = {"amax": amax}
        if heads is not None:
            batch |= per_token_statistics(heads, tokens, reduce)
        if "histogram" in self._fields:
            batch["histogram"] = reduce.histogram(x)
        if "total" in self._fields:
            # multiples of 2**-20 add up exactly in float64, below 2**33: batches in any order and on any
            # number of processes add up to the same bits
            batch["total"] = x.sum(0, dtype=torch.float64).mul_(_GRID).round_().div_(_GRID)
            batch["low"], batch["high"] = x.aminmax(dim=0)
        for field, new in batch.items():
            total = self._values.setdefault(field, new)
            if total is not new:
                STATISTICS[field].combine(total, new, out=total)

    def result(self) -> TensorStats:
        """Return the statistics, on the CPU."""
        assert self._values, "no batch was added"
        return TensorStats(
            **{field: x.to("cpu", STATISTICS[field].dtype) for field, x in self._values.items()}
        )


class RunningLayer:
    """Statistics so far of one attention module: `fields` of K and V, `query_fields` of Q."""

    def __init__(self, module: CachedAttention, fields: Set[str], query_fields: Set[str]) -> None:
        self.module = module
        self.tokens = self.read = 0
        self.k, self.v, self.q = RunningTensor(fields), RunningTensor(fields), RunningTensor(query_fields)

    def update(self, query: Tensor, key: Tensor, value: Tensor, tokens: CountedTokens) -> None:
        """Add the `tokens` of query [B, H, T, D], key and value [B, K * kv_repeat, T, D]."""
        repeat, tokens = self.module.kv_repeat, tokens.to(key.device)
        self.q.update(_token_rows(query, tokens.rows), tokens)
        self.k.update(_token_rows(key, tokens.rows)[:, ::repeat], tokens)
        self.v.update(_token_rows(value, tokens.rows)[:, ::repeat], tokens)
        self.tokens += len(tokens.buckets)
        self.read += tokens.read

    def result(self) -> LayerStats:
        """Return the statistics, on the CPU."""
        k, v, q = self.k.result(), self.v.result(), self.q.result()
        return LayerStats(self.module.layer_idx, self.tokens, k, v, q, self.module.latent, self.read)


def _token_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    # [B, H, T, D] -> [B * T, H, D]: a view, because projections write token by token
    tokens = x.transpose(1, 2).flatten(0, 1)
    return tokens if rows is None else tokens[rows]
