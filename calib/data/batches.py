"""Group samples of unequal length into batches with next to no padding."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from calib.errors import InputError
from calib.recipe import DataRecipe

# padded positions cost compute and are masked out of the statistics
MAX_PADDING = 0.05
# a few thousand tokens keep every core busy; more only costs memory
CPU_TOKENS_PER_BATCH = 4096
# enough to be bound by compute, while activations stay far below the size of the weights
ACCELERATOR_TOKENS_PER_BATCH = 16384


@dataclass(frozen=True)
class Batch:
    """One forward pass: samples of similar length, longest first, padded on the right.

    Its real tokens are read row by row, and have an index in the run: `first_token` is the first's.
    """

    input_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] int64, 1 = real token
    sample_ids: tuple[int, ...]  # row -> index in CalibrationData.samples
    first_token: int  # how many real tokens the batches before it hold
    skip_first: int = 0  # tokens of each sample that are read and not counted

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding."""
        return int(self.attention_mask.sum())

    @property
    def has_padding(self) -> bool:
        """Whether any row is shorter than the longest one."""
        return self.num_tokens < self.attention_mask.numel()


def make_batches(
    samples: Sequence[Sequence[int]],
    batch_size: int,
    pad_id: int,
    *,
    seed: int = 42,
    skip_first: int = 0,
) -> list[Batch]:
    """Batch `samples` of similar length, so that less than 5 % of each batch is padding.

    Padding goes to the right: attention is causal, so a real token never sees what follows it, and
    keeps the position (and therefore the rotated key) that it has alone. The largest batch is the
    first, so a lack of memory shows at once. The others are shuffled with `seed`: whatever grows
    with the tokens then does so because of their number, not of their lengths.

    Samples of `skip_first` tokens or fewer are left out; an InputError if that leaves none.
    """
    largest, *others = _groups(samples, batch_size, skip_first) or [[]]
    random.Random(seed).shuffle(others)
    groups = [group for group in (largest, *others) if group]
    before = accumulate((sum(len(samples[i]) for i in group) for group in groups), initial=0)
    return [
        _pad(samples, group, pad_id, first_token, skip_first)
        for group, first_token in zip(groups, before, strict=False)
    ]


def resolve_batch_size(recipe: DataRecipe, device_type: str) -> int:
    """Samples per forward pass; 'auto' divides a fixed token budget by `seq_len`."""
    if recipe.batch_size != "auto":
        return int(recipe.batch_size)
    # not by the memory that is free: the number must be reproducible
    budget = CPU_TOKENS_PER_BATCH if device_type == "cpu" else ACCELERATOR_TOKENS_PER_BATCH
    return max(1, budget // recipe.seq_len)


def shared_batch_size(
    recipe: DataRecipe, device_type: str, samples: Sequence[Sequence[int]], processes: int
) -> int:
    """`resolve_batch_size`, where 'auto' is made smaller if a process would get no batch."""
    size = resolve_batch_size(recipe, device_type)
    groups = _groups(samples, size, recipe.skip_first)
    if recipe.batch_size != "auto" or len(groups) >= processes:
        return size
    return max(1, sum(map(len, groups)) // processes)


def _groups(samples: Sequence[Sequence[int]], batch_size: int, skip_first: int) -> list[list[int]]:
    counted = [i for i, sample in enumerate(samples) if len(sample) > skip_first]
    if samples and not counted:
        raise InputError(
            f"data.skip_first {skip_first} leaves nothing: the longest sample has "
            f"{max(map(len, samples))} tokens; set it lower"
        )
    longest_first = sorted(counted, key=lambda i: (-len(samples[i]), i))
    groups: list[list[int]] = []
    for i in longest_first:
        if groups and len(groups[-1]) < batch_size and _fits(samples, groups[-1], i):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _fits(samples: Sequence[Sequence[int]], group: list[int], candidate: int) -> bool:
    width = len(samples[group[0]])
    total = width * (len(group) + 1)
    real = sum(len(samples[i]) for i in (*group, candidate))
    return (total - real) / total < MAX_PADDING


def _pad(
    samples: Sequence[Sequence[int]],
    group: list[int],
    pad_id: int,
    first_token: int,
    skip_first: int,
) -> Batch:
    shape = len(group), len(samples[group[0]])
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    for row, i in enumerate(group):
        input_ids[row, : len(samples[i])] = torch.tensor(samples[i], dtype=torch.int64)
        attention_mask[row, : len(samples[i])] = 1
    return Batch(input_ids, attention_mask, tuple(group), first_token, skip_first)
