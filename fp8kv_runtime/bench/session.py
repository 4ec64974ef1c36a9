"""One shape's cases on this machine: checked, tuned, measured."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fp8kv_runtime.bench import correctness as gate
from fp8kv_runtime.bench.cases import Case, build, call, in_float16, load_launchers, tiny
from fp8kv_runtime.bench.timing import GpuTimer, Work
from fp8kv_runtime.bench.tune import KERNELS, Tuner, merged
from fp8kv_runtime.kernels.table import read_table, tuned_path, write_table
from fp8kv_runtime.kernels.targets import current_target, gpu_name
from fp8kv_runtime.kernels.tuning import forget_tuned

Say = Callable[..., None]  # like print
EachOf = Callable[[Sequence[Case]], Iterator[Case]]  # iterates, and may count

_K = 1024
_DECODED = {
    "1 x 1k": (_K,),
    "1 x 8k": (8 * _K,),
    "1 x 32k": (32 * _K,),
    "8 x 16k": (16 * _K,) * 8,
    "64 x 2k": (2 * _K,) * 64,
}


@dataclass(frozen=True)
class Row:
    """One case, timed on the GPU with a cold L2, on a cache of FP8 and on one of float16."""

    kernel: str
    case: str
    us: float
    tb_per_s: float  # of K and V in FP8
    float16_us: float


@dataclass(frozen=True)
class Bench:
    """A shape's cases and the device they run on."""

    cases: tuple[Case, ...]
    device: torch.device

    @classmethod
    def of(cls, heads: tuple[int, int, int], block_size: int, device: torch.device) -> "Bench":
        """Decode at lengths from 1k to 32k, a prompt of 8k, and storing: small without a GPU."""
        shape = (*heads, block_size)
        cases = (
            Case("append_kv", "1 token of each of 64", (2 * _K,) * 64, 1, *shape),
            *(Case("decode_attention", name, n, 1, *shape) for name, n in _DECODED.items()),
            Case("extend_attention", "prompt of 8k", (8 * _K,), 8 * _K, *shape),
        )
        return cls(cases if device.type == "cuda" else tiny(cases), device)

    @property
    def gpu(self) -> str:
        """The GPU's name."""
        return gpu_name(self.device)

    def wrong(self, say: Say, each_of: EachOf = iter) -> list[str]:
        """Names of the cases that a kernel gets wrong, on FP8 and on float16."""
        found = []
        for each in each_of(self.cases):
            for case in (each, in_float16(each)):
                if not gate.checked(case, self._launchers, self.device, say):
                    found.append(f"{case.kernel} {case.name} {case.format}".strip())
        return found

    def tune(self, say: Say) -> Path:
        """Find the fastest configs and write them to this machine's table, which is returned."""
        path = tuned_path()
        write_table(path, read_table(path))  # or stop before minutes of measuring
        target = current_target()
        names = (self.gpu, target.name, target.backend)
        tuner = Tuner(names, self.device, self._launchers, self._measure, say)
        found = {
            kernel: [
                tuner.tune(kernel, tuple(form(c) for c in self.cases if c.kernel == launcher))
                for form in (lambda case: case, in_float16)
            ]
            for kernel, launcher in KERNELS.items()
        }
        write_table(path, merged(read_table(path), found))
        forget_tuned()
        return path

    def measure(self, each_of: EachOf = iter) -> tuple[float, list[Row]]:
        """TB/s of a copy within the GPU's memory, and a row for each case."""
        rows = []
        for case in each_of(self.cases):
            forms = {"fp8": case, "float16": in_float16(case)}
            work: dict[str, Work] = {
                name: call(form, build(form, self.device), self._launchers) for name, form in forms.items()
            }
            times = self._measure(work)
            us, speed = times["fp8"], case.num_bytes / times["fp8"] / 1e6
            rows.append(Row(case.kernel, case.name, us, speed, times["float16"]))
        return self._timer.copy_bandwidth() / 1e12, rows

    @cached_property
    def _timer(self) -> GpuTimer:
        return GpuTimer()

    @cached_property
    def _launchers(self) -> dict[str, Any]:
        return dict(load_launchers())

    def _measure(self, work: dict[str, Work]) -> dict[str, float]:
        return {name: timing.us for name, timing in self._timer.measure(work).items()}
