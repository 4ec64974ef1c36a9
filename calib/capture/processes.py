"""One calibration in many processes: ranks share out the batches and merge their statistics.

`torchrun` or `accelerate launch` starts the processes and says in the environment which is which. Statistics
merge by max, min and exact sums, so the number of processes changes no bit of them, at one batch size and
number of threads. On a CPU the model's last bits can depend on both, and torchrun sets OMP_NUM_THREADS=1
where a single process takes every core.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from calib.errors import Fp8kvError, InputError, one_line
from calib.files.strict_json import json_text
from calib.scales.stats import KVStats

Item = TypeVar("Item")

# loading a large model and one rank's share of the data both lie between two collectives
TIMEOUT = timedelta(hours=6)


@dataclass(frozen=True)
class World:
    """This process among those of one run; its methods wait for all of them."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # None: that of all processes

    @property
    def is_first(self) -> bool:
        """Return whether this is the process that prints and writes."""
        return self.rank == 0

    def share(self, batches: Sequence[Item]) -> Sequence[Item]:
        """Return this rank's batches, every `size`-th, long and short ones alike; refuse too few for all."""
        if len(batches) < self.size:
            raise InputError(
                f"{self.size} processes cannot share {len(batches)} batches; start fewer processes, or use a "
                "smaller --batch-size or more --samples"
            )
        return batches[self.rank :: self.size]

    def check_same(self, label: str, value: Any) -> None:
        """Check that every rank has the same `value`, which JSON can hold; else all fail."""
        texts = self.gather(json_text(value, sort_keys=True, default=str))
        if len({*texts}) > 1:
            raise InputError(f"the processes have different {label}; start every one with the same command")

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
        failures = [message for message in self.gather(failure) if message is not None]
        if failures:
            raise InputError(failures[0])
        return result[0]

    def reduce(self, stats: KVStats) -> KVStats:
        """Return the statistics of all ranks together, on every rank."""
        # one rank after the other: histograms of all at once would take much memory
        return reduce(KVStats.merge, (self._broadcast(stats, rank) for rank in range(self.size)))

    def _broadcast(self, value: Item, rank: int) -> Item:
        """Return the `value` of one rank, on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, rank, self.group)
        return values[0]

    def gather(self, value: Item) -> list[Item]:
        """Return each rank's `value`, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self.group)
        return values


@contextmanager
def joined_world() -> Iterator[World]:
    """Join the other processes of this run, if a launcher has started any; refuse what cannot be joined."""
    size = _environment("WORLD_SIZE", 1)
    if size == 1:
        yield World()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(_environment("LOCAL_RANK", 0))
    try:
        # statistics are merged on the CPU, a few megabytes at the end
        dist.init_process_group("gloo", timeout=TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"cannot join {size} processes: {one_line(error)}; start them with torchrun or accelerate launch"
        ) from None
    try:
        yield World(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()


@contextmanager
def surrounding_world() -> Iterator[World]:
    """Yield the processes of a program that has initialised torch.distributed, or this one alone."""
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
    """Return whether this is the first process of the run, or the only one; needs no world."""
    return _environment("RANK", 0) == 0


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise InputError(f"the environment says {name}={text}; a launcher sets it to a number")
    return int(text)
