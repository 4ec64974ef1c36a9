"""Find the fastest configs of the attention kernels on this GPU, and save them for later launches.

    python tools/tune_kernels.py [MODEL] [--heads 32/8/128] [--block-size 64]

Tiles, warps and stages first, each compiled once per shape; then, with the best of them, how many
programs decode launches and how little each may read, and from where on torch's attention takes
prompts. No config is taken that the reference contradicts. The table is `~/.cache/fp8kv/tuning.json`,
or `$FP8KV_TUNING`.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# a checkout is enough: nothing has to be installed
sys.path.insert(0, str(Path(__file__).parent.parent))

from calib.bench.kernels import Case, Launchers, bench_cases, build, call, check, load_launchers, time_on_gpu
from calib.bench.run import attention_heads, parse_heads
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.kernels import tuning
from fp8kv_runtime.kernels.launch import current_target
from fp8kv_runtime.kernels.targets import gpu_name
from fp8kv_runtime.kernels.tuning import Config, ConfigRow, Table, find_config, read_table, tuned_path

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

_NEW = (512, 1024, 2048, 4096)  # tokens of prompts, beside that of the table, that torch's attention may take
_NEVER = 2**50  # pairs: no prompt has as many

Measure = Callable[[Callable[[], object], bool], float]  # microseconds; of a CUDA graph or not


def main() -> None:
    """Tune for the shape of a model, or of `--heads`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a config.json, a model directory or a Hub id")
    parser.add_argument("--heads", default="32/8/128", help="query heads, KV heads, head_dim")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--kernel", choices=KERNELS, help="this one alone")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the kernels are timed on a GPU, and torch finds none here")
    torch.set_float32_matmul_precision("highest")  # TF32 would be no reference
    heads = attention_heads(args.model) if args.model else parse_heads(args.heads)
    with torch.inference_mode():
        device = torch.device("cuda")
        kernels = {args.kernel: KERNELS[args.kernel]} if args.kernel else KERNELS
        cases = bench_cases(heads, args.block_size, device)
        print("written:", tune(cases, device, time_on_gpu, print, kernels))


def tune(
    cases: tuple[Case, ...],
    device: torch.device,
    measure: Measure,
    say: Callable[[str], None],
    kernels: Mapping[str, str] = KERNELS,
) -> Path:
    """Write the fastest configs over the cases to this machine's table, and return its path."""
    path = tuned_path()
    write_table(path, read_table(path))  # or stop before minutes of measuring
    target = current_target()
    tuner = Tuner((gpu_name(device), target.name, target.backend), device, load_launchers(), measure, say)
    rows = {
        kernel: [
            tuner.tune(kernel, tuple(replace(c, format=form) for c in cases if c.kernel == launcher))
            for form in (cases[0].format, "float16")
        ]
        for kernel, launcher in kernels.items()
    }
    write_table(path, merge_tables(read_table(path), rows))
    tuning.forget_tuned()
    return path


@contextlib.contextmanager
def pinned(kernel: str, config: Config) -> Iterator[None]:
    """Inside, this kernel is launched with this config."""
    find = tuning.find_config

    def find_or_pin(name: str, *place: Any) -> Config:
        return config if name == kernel else find(name, *place)

    with mock.patch.object(tuning, "find_config", find_or_pin):
        yield


@dataclass(frozen=True)
class Tuner:
    """A search over configs, on one GPU."""

    names: tuple[str, ...]  # of the GPU, the target and its backend
    device: torch.device
    launchers: Launchers
    measure: Measure
    say: Callable[[str], None]

    def tune(self, kernel: str, cases: tuple[Case, ...]) -> ConfigRow:
        """Return the row of the fastest config over `cases`, which share number format and head_dim."""
        bits = 16 if cases[0].format == "float16" else 8
        head_dim = cases[0].head_dim
        # first with our kernels alone
        best = replace(find_config(kernel, self.names, bits, head_dim), pairs=_NEVER)
        for candidates in (_compiled, _launched):
            best = self._fastest(kernel, best, candidates(kernel, self.names[-1], best), cases)
            if kernel == "extend":
                cases += tuple(_shorter(cases[0]))
        width = 1 << (head_dim - 1).bit_length()
        return ConfigRow(self.names[0], bits, width, best, over=width // 2)

    def _fastest(
        self, kernel: str, current: Config, candidates: Iterable[Config], cases: tuple[Case, ...]
    ) -> Config:
        """Return the fastest config: one of the candidates, or the current one."""
        before, best, shortest = self._times(kernel, current, cases), current, 1.0
        for config in dict.fromkeys(candidates):
            if config == current:
                continue
            if reason := self._refusal(kernel, config, cases):
                self.say(f"{kernel} {_describe(config)}: {reason}")
                continue
            times = self._times(kernel, config, cases)
            ratio = math.prod(t / b for t, b in zip(times, before, strict=True)) ** (1 / len(cases))
            self.say(f"{kernel} {_describe(config)}: {ratio:.3f} of the time")
            if ratio < _GAIN * shortest:
                best, shortest = config, ratio
        return best

    def _refusal(self, kernel: str, config: Config, cases: tuple[Case, ...]) -> str:
        """Return why this config cannot be taken; nothing where it can."""
        with pinned(kernel, config):
            for case in cases:
                try:
                    verdict = check(case, self.launchers, self.device)
                except Exception as error:  # noqa: BLE001  whatever the compiler or the GPU raises
                    return f"{type(error).__name__}: {error}".splitlines()[0]
                if not verdict.ok:
                    return verdict.text
        return ""

    def _times(self, kernel: str, config: Config, cases: tuple[Case, ...]) -> list[float]:
        with pinned(kernel, config):
            calls = [call(case, build(case, self.device), self.launchers) for case in cases]
            return [self.measure(run, cases[0].captures) for run in calls]


def write_table(path: Path, table: Table) -> None:
    """Write a table, whole or not at all.

    Raises:
        AttentionError: it cannot be written.
    """
    plain = {
        kernel: [
            {"on": row.on, "bits": row.bits, "over": row.over, "head_dim": row.head_dim} | asdict(row.config)
            for row in rows
        ]
        for kernel, rows in table.items()
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(json.dumps(plain, indent=2, allow_nan=False) + "\n")
        new.replace(path)
    except OSError as error:
        raise AttentionError(
            f"cannot write {path}: {error.strerror}; set FP8KV_TUNING to another file"
        ) from error


def merge_tables(table: Table, new: dict[str, list[ConfigRow]]) -> Table:
    """Put new rows before those of the table, and instead of those for the same place."""
    result = {kernel: tuple(rows) for kernel, rows in new.items()}
    for kernel, rows in table.items():
        first = result.get(kernel, ())
        places = {_place(row) for row in first}
        result[kernel] = (*first, *(row for row in rows if _place(row) not in places))
    return result


def _place(row: ConfigRow) -> tuple[str, int, int]:
    return row.on, row.bits, row.head_dim


def _compiled(kernel: str, backend: str, current: Config) -> Iterator[Config]:
    """Yield configs that are compiled differently."""
    rows = _ROWS if kernel == "extend" else (current.rows,)
    stages_of = _STAGES.get((kernel, backend), (current.num_stages,))
    for tile, warps, stages, m in itertools.product(_TILES, _WARPS[kernel], stages_of, rows):
        if tile > 64 * warps:  # no warp has registers for more
            continue
        yield replace(current, tile=tile, num_warps=warps, num_stages=stages, rows=m)


def _launched(kernel: str, backend: str, current: Config) -> Iterator[Config]:
    """Yield configs that are launched differently."""
    if kernel == "decode":
        for programs, least in itertools.product(_PROGRAMS, _LEAST):
            yield replace(current, per_processor=programs, least=least)
    else:
        yield from (replace(current, pairs=2**n) for n in range(18, 31))


def _shorter(prompt: Case) -> Iterator[Case]:
    """Yield shorter prompts of the same shape."""
    for new in _NEW:
        if new < prompt.new:
            yield replace(prompt, name=f"prompt of {new}", lengths=(new,), new=new)


def _describe(config: Config) -> str:
    return (
        f"tile {config.tile}, {config.num_warps} warps, {config.num_stages} stages, "
        f"{config.rows} rows, {config.per_processor} programs, {config.least} tiles"
        + (f", {config.pairs} pairs" if config.pairs < _NEVER else "")
    )


if __name__ == "__main__":
    main()
