"""`fp8kv bench --tune`: which config is fastest on this GPU, among those that are right.

Tiles, warps and stages first, each compiled once per shape; then, with the best of them, how many
programs decode launches and how little each may read. Nothing is taken that the gate refuses.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from fp8kv_runtime.bench import correctness as gate
from fp8kv_runtime.bench.cases import Case, Launchers, build, call
from fp8kv_runtime.bench.timing import Work
from fp8kv_runtime.kernels.table import Config, Row, Table
from fp8kv_runtime.kernels.tuning import find_config, pinned

KERNELS = {"decode": "decode_attention", "extend": "extend_attention"}
_TILES = (16, 32, 64, 128)
_WARPS = {"decode": (1, 2, 4, 8), "extend": (4, 8)}
_STAGES = {
    ("decode", "cuda"): (3, 5, 7),
    ("extend", "cuda"): (2, 3),
    ("decode", "hip"): (1, 2),
    ("extend", "hip"): (1, 2),
}
_ROWS = (64, 128)  # of extend; of decode they follow from the heads
_PROGRAMS, _LEAST = (1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 4, 8)
_GAIN = 0.98  # of the time: what is less of a gain is noise


@dataclass(frozen=True)
class Tuner:
    """Where configs are tried, and on what."""

    names: tuple[str, ...]  # of the GPU, the target and its backend
    device: torch.device
    launchers: Launchers
    # microseconds of each work, measured in turn
    measure: Callable[[dict[str, Work]], dict[str, float]]
    say: Callable[[str], None]

    def tune(self, kernel: str, cases: tuple[Case, ...]) -> Row:
        """The row of the fastest config over `cases`, which share number format and head_dim."""
        bits = 16 if cases[0].format == "float16" else 8
        head_dim = cases[0].head_dim
        best = find_config(kernel, self.names, bits, head_dim)
        for candidates in (_compiled, _launched):
            best = self._fastest(kernel, best, candidates(kernel, self.names[-1], best), cases)
        width = 1 << (head_dim - 1).bit_length()
        return Row(self.names[0], bits, width, best, over=width // 2)

    def _fastest(
        self, kernel: str, known: Config, candidates: Iterable[Config], cases: tuple[Case, ...]
    ) -> Config:
        """Return the fastest config: one of the candidates, or the one known to work."""
        before, best, shortest = self._times(kernel, known, cases), known, 1.0
        for config in dict.fromkeys(candidates):
            if config == known:
                continue
            if refused := self._refused(kernel, config, cases):
                self.say(f"{kernel} {_describe(config)}: {refused}")
                continue
            times = self._times(kernel, config, cases)
            ratio = math.prod(t / b for t, b in zip(times, before, strict=True)) ** (1 / len(cases))
            self.say(f"{kernel} {_describe(config)}: {ratio:.3f} of the time")
            if ratio < _GAIN * shortest:
                best, shortest = config, ratio
        return best

    def _refused(self, kernel: str, config: Config, cases: tuple[Case, ...]) -> str:
        """Why this config cannot be taken; nothing where it can."""
        with pinned(kernel, config):
            for case in cases:
                try:
                    verdict = gate.check(case, self.launchers, self.device)
                except Exception as error:  # noqa: BLE001  whatever the compiler or the GPU raises
                    return f"{type(error).__name__}: {error}".splitlines()[0]
                if not verdict.passed:
                    return verdict.found
        return ""

    def _times(self, kernel: str, config: Config, cases: tuple[Case, ...]) -> list[float]:
        with pinned(kernel, config):
            times = self.measure(
                {case.name: call(case, build(case, self.device), self.launchers) for case in cases}
            )
        return [times[case.name] for case in cases]


def merged(table: Table, found: dict[str, list[Row]]) -> Table:
    """Merge new rows into the table: first, and instead of rows for the same place."""
    result = {kernel: tuple(rows) for kernel, rows in found.items()}
    for kernel, rows in table.items():
        new = result.get(kernel, ())
        places = {_place(row) for row in new}
        result[kernel] = (*new, *(row for row in rows if _place(row) not in places))
    return result


def _place(row: Row) -> tuple[str, int, int]:
    return row.on, row.bits, row.head_dim


def _compiled(kernel: str, backend: str, known: Config) -> Iterator[Config]:
    """Configs that are compiled differently."""
    rows = _ROWS if kernel == "extend" else (known.rows,)
    stages_of = _STAGES.get((kernel, backend), (known.num_stages,))
    for tile, warps, stages, m in itertools.product(_TILES, _WARPS[kernel], stages_of, rows):
        if tile > 64 * warps:  # no warp has registers for more
            continue
        yield replace(known, tile=tile, num_warps=warps, num_stages=stages, rows=m)


def _launched(kernel: str, backend: str, known: Config) -> Iterator[Config]:
    """Configs that are launched differently."""
    if kernel == "decode":
        for programs, least in itertools.product(_PROGRAMS, _LEAST):
            yield replace(known, per_processor=programs, least=least)


def _describe(config: Config) -> str:
    return (
        f"tile {config.tile}, {config.num_warps} warps, {config.num_stages} stages, "
        f"{config.rows} rows, {config.per_processor} programs, {config.least} tiles"
    )
