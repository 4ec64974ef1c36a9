"""Batches of samples of similar length, with next to no padding."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from calib.data.samples import MediaSample
from calib.errors import InputError
from calib.recipe import DataRecipe

MAX_PADDING = 0.05  # share of a batch: padded positions cost compute, and statistics leave them out
# a few thousand tokens keep every core busy; more only costs memory
CPU_TOKENS_PER_BATCH = 4096
# enough to be bound by compute, while activations stay far below the size of the weights
ACCELERATOR_TOKENS_PER_BATCH = 16384


@dataclass(frozen=True)
class Batch:
    """Samples of one forward pass, the longest first, padded on the right.

    Real tokens are numbered through the whole run, row by row.
    """

    input_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] int64, 1 = real token
    sample_ids: tuple[int, ...]  # row -> index in CalibrationData.samples
    first_token: int  # number of the first real token
    skip_first: int = 0  # tokens of each sample that are read and not counted
    media: MediaSample | None = None  # of the one sample of a batch that a processor has made
    places: Mapping[int, str] = field(default_factory=dict)  # sample -> its row, such as "a.jsonl, line 3"

    @property
    def num_tokens(self) -> int:
        """Number of real tokens, without padding."""
        return int(self.attention_mask.sum())


def make_batches(
    samples: Sequence[Sequence[int]], batch_size: int, pad_id: int, *, seed: int = 42, skip_first: int = 0
) -> list[Batch]:
    """Put samples of similar length together, so that less than 5 % of each batch is padding.

    Padding goes to the right: attention is causal, so a real token keeps the keys that it has without
    padding. The largest batch is the first, so a lack of memory shows at once. `seed` shuffles the
    others, so that statistics grow with the number of tokens and not with the lengths of samples.
    Samples of `skip_first` tokens or fewer are left out; an InputError if no sample is left.
    """
    groups = _group_by_length(samples, batch_size, skip_first)
    shuffled = groups[1:]
    random.Random(seed).shuffle(shuffled)
    batches = list[Batch]()
    first_token = 0
    for group in [*groups[:1], *shuffled]:
        input_ids = torch.full((len(group), len(samples[group[0]])), pad_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, i in enumerate(group):
            input_ids[row, : len(samples[i])] = torch.tensor(samples[i])
            attention_mask[row, : len(samples[i])] = 1
        batches.append(Batch(input_ids, attention_mask, tuple(group), first_token, skip_first))
        first_token += sum(len(samples[i]) for i in group)
    return batches


def resolve_batch_size(recipe: DataRecipe, device_type: str) -> int:
    """Return the samples of a forward pass; 'auto' divides a fixed number of tokens by `seq_len`."""
    if recipe.batch_size != "auto":
        return recipe.batch_size
    # free memory would give another number, and other results, on every machine
    tokens = CPU_TOKENS_PER_BATCH if device_type == "cpu" else ACCELERATOR_TOKENS_PER_BATCH
    return max(1, tokens // recipe.seq_len)


def shared_batch_size(
    recipe: DataRecipe, device_type: str, samples: Sequence[Sequence[int]], processes: int
) -> int:
    """Return `resolve_batch_size`, with 'auto' reduced until every process gets a batch."""
    size = resolve_batch_size(recipe, device_type)
    groups = _group_by_length(samples, size, recipe.skip_first)
    if recipe.batch_size != "auto" or len(groups) >= processes:
        return size
    return max(1, sum(map(len, groups)) // processes)


def _group_by_length(samples: Sequence[Sequence[int]], batch_size: int, skip_first: int) -> list[list[int]]:
    """Return the indices of samples, the longest first, in groups that need little padding."""
    indices = [i for i, sample in enumerate(samples) if len(sample) > skip_first]
    if samples and not indices:
        raise InputError(
            f"data.skip_first {skip_first} leaves nothing: the longest sample has "
            f"{max(map(len, samples))} tokens; set it lower"
        )
    groups = list[list[int]]()
    positions = tokens = 0  # of the last group, with the next sample in it
    for i in sorted(indices, key=lambda i: (-len(samples[i]), i)):
        length = len(samples[i])
        if groups and len(groups[-1]) < batch_size:
            positions += len(samples[groups[-1][0]])
            tokens += length
            if (positions - tokens) / positions < MAX_PADDING:
                groups[-1].append(i)
                continue
        groups.append([i])
        positions = tokens = length
    return groups
