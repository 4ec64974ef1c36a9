"""One calibration in many processes: ranks share out the batches and reduce their statistics.

`torchrun` or `accelerate launch` starts the processes and says in the environment which is which.
Statistics merge by max, min and exact sums, so the number of processes changes no bit of them, at
one batch size and number of threads. On a CPU the model's last bits can depend on both, and
torchrun sets OMP_NUM_THREADS=1 where a single process takes every core.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from calib.errors import Fp8kvError, InputError
from calib.files.strict_json import json_text
from calib.scales.stats import STATISTICS, KVStats
from calib.scales.text_summary import TextSummary

Item = TypeVar("Item")
Group = dist.ProcessGroup | None

# loading a large model and one rank's share of the data both lie between two collectives
TIMEOUT = timedelta(hours=6)
_REDUCTIONS: dict[Callable[..., Tensor], dist.ReduceOp.RedOpType] = {
    torch.maximum: dist.ReduceOp.MAX,
    torch.minimum: dist.ReduceOp.MIN,
    torch.add: dist.ReduceOp.SUM,
}


@dataclass(frozen=True)
class World:
    """This process among those of one run; its methods wait for all of them."""

    rank: int = 0
    size: int = 1
    group: Group = None  # None: that of all processes

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def share(self, batches: Sequence[Item]) -> Sequence[Item]:
        """This rank's batches: every `size`-th, so that long and short ones are spread."""
        if len(batches) < self.size:
            raise InputError(
                f"{self.size} processes cannot share {len(batches)} batches; start fewer "
                "processes, or use a smaller --batch-size or more --samples"
            )
        return batches[self.rank :: self.size]

    def check_same(self, what: str, value: Any) -> None:
        """Check that every rank has the same `value`, which JSON can hold; else all fail."""
        mine = json_text(value, sort_keys=True, default=str)
        different = [rank for rank, other in enumerate(self.gather(mine)) if other != mine]
        if any(self.gather(bool(different))):
            raise InputError(f"the processes have different {what}; start every one with the same command")

    def together(self, work: Callable[[], Item]) -> Item:
        """Do `work` on every rank; if it fails on one, every rank raises that error."""
        result: list[Item] = []
        failure: str | None = None
        try:
            result.append(work())
        except Fp8kvError as error:
            failure = str(error)
            if self.size == 1:
                raise
        failures = [each for each in self.gather(failure) if each is not None]
        if failures:
            raise InputError(failures[0])
        return result[0]

    def reduce(self, stats: KVStats) -> KVStats:
        """Statistics of all ranks together, on every rank."""
        if self.size == 1:
            return stats
        texts = self.gather(stats.text)
        known = [text for text in texts if text is not None]
        text = reduce(TextSummary.join, known) if len(known) == len(texts) else None
        return replace(_reduced(stats, self.group), text=text)

    def gather(self, value: Item) -> list[Item]:
        """Each rank's `value`, in their order."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, self.group)
        return gathered


@contextmanager
def joined_world() -> Iterator[World]:
    """Join the other processes of this run, if a launcher has started any."""
    size = _environment("WORLD_SIZE", 1)
    if size == 1:
        yield World()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(_environment("LOCAL_RANK", 0))
    try:
        # statistics are reduced on the CPU, a few megabytes at the end
        dist.init_process_group("gloo", timeout=TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"cannot join {size} processes: {' '.join(str(error).split())}; "
            "start them with torchrun or accelerate launch"
        ) from None
    try:
        yield World(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()


@contextmanager
def surrounding_world() -> Iterator[World]:
    """The processes of a program that has initialised torch.distributed, or this one alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield World()
        return
    # statistics lie on the CPU, which the program's own backend, such as NCCL, may not serve
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), group)
    finally:
        dist.destroy_process_group(group)


def is_first_process() -> bool:
    """Whether this is the first process of the run, or the only one; needs no world."""
    return _environment("RANK", 0) == 0


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise InputError(f"the environment says {name}={text}; a launcher sets it to a number")
    return int(text)


def _reduced(stats: KVStats, group: Group) -> KVStats:
    tensors = stats.tensors()
    for field, statistic in STATISTICS.items():
        held = {place: x for place, x in tensors.items() if place[2] == field}
        reduced = _all_combined([*held.values()], statistic.combine, group)
        tensors.update(zip(held, reduced, strict=True))
    (counts,) = _all_reduced([torch.tensor(stats.counts())], dist.ReduceOp.SUM, group)
    return stats.replace_tensors(tensors, counts.tolist())


def _all_combined(tensors: list[Tensor], combine: Callable[..., Tensor], group: Group) -> list[Tensor]:
    """Combine each tensor with those of the other ranks, in one message for all."""
    if combine in _REDUCTIONS or not tensors:
        return _all_reduced(tensors, _REDUCTIONS.get(combine, dist.ReduceOp.MAX), group)
    together = torch.cat(tensors)
    gathered = [torch.empty_like(together) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, together, group)
    return [*torch.split(reduce(combine, gathered), [len(tensor) for tensor in tensors])]


def _all_reduced(tensors: list[Tensor], operation: dist.ReduceOp.RedOpType, group: Group) -> list[Tensor]:
    """Reduce tensors of one dtype in one message: hundreds of small ones would wait for each."""
    if not tensors:
        return []
    together = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(together, operation, group)
    parts = together.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
