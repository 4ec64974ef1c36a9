"""Group samples of unequal length into batches with next to no padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.recipe import DataRecipe

# padded positions cost compute and are masked out of the statistics
MAX_PADDING = 0.05
# a few thousand tokens keep every core busy; more only costs memory
CPU_TOKENS_PER_BATCH = 4096
# enough to be bound by compute, while activations stay far below the size of the weights
ACCELERATOR_TOKENS_PER_BATCH = 16384


@dataclass(frozen=True)
class Batch:
    """One forward pass: samples of similar length, longest first, padded on the right."""

    input_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] int64, 1 = real token
    sample_ids: tuple[int, ...]  # row -> index in CalibrationData.samples

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding."""
        return int(self.attention_mask.sum())

    @property
    def has_padding(self) -> bool:
        """Whether any row is shorter than the longest one."""
        return self.num_tokens < self.attention_mask.numel()


def make_batches(samples: Sequence[Sequence[int]], batch_size: int, pad_id: int) -> list[Batch]:
    """Batch `samples`, longest first, so that less than 5 % of each batch is padding.

    Padding goes to the right: attention is causal, so a real token never sees what follows it, and
    keeps the position (and therefore the rotated key) that it has alone.
    """
    return [_pad(samples, group, pad_id) for group in _groups(samples, batch_size)]


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
    if recipe.batch_size != "auto" or len(_groups(samples, size)) >= processes:
        return size
    return max(1, len(samples) // processes)


def _groups(samples: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    longest_first = sorted(range(len(samples)), key=lambda i: (-len(samples[i]), i))
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


def _pad(samples: Sequence[Sequence[int]], group: list[int], pad_id: int) -> Batch:
    shape = len(group), len(samples[group[0]])
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    for row, i in enumerate(group):
        input_ids[row, : len(samples[i])] = torch.tensor(samples[i], dtype=torch.int64)
        attention_mask[row, : len(samples[i])] = 1
    return Batch(input_ids, attention_mask, tuple(group))
