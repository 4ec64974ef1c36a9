"""One calibration in this process, or in each of several, and what it took, as a line of JSON.

scale_child.py MODEL OUTPUT KEY=VALUE ...
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from machine import peak_bytes
from safetensors.torch import load_file

from calib.capture.processes import World
from calib.commands.flags import parse_assignments
from calib.files.names import STATS_FILE
from calib.job import run
from calib.recipe import load_recipe
from calib.scales.stats import KVStats

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SETTINGS = {"data.dataset": "builtin:python-docs", "device": "cpu", "export.weights": "none"}


def calibrate_in_child(
    model: Path | str, output: Path, settings: dict[str, Any], processes: int = 1
) -> dict[str, Any]:
    """Calibrate in new processes and return what the first of them printed."""
    launcher = [*LAUNCHER, str(processes)] if processes > 1 else []
    pairs = [f"{key}={value}" for key, value in (SETTINGS | settings).items()]
    command = [sys.executable, *launcher, __file__, str(model), str(output), *pairs]
    # as many threads in all as the machine has cores, whatever the number of processes
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    print(f"{processes} x {output.name}: {' '.join(pairs)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=output.parent
    )
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def digest(output: Path) -> str:
    """Return the sha256 of all statistics in `output`."""
    found = hashlib.sha256()
    for name, tensor in sorted(load_file(output / STATS_FILE).items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    """Calibrate; the first process prints."""
    model, output, *pairs = sys.argv[1:]
    recipe = load_recipe(None, parse_assignments(pairs))
    reducing = _time_reductions()
    read, start = _bytes_read(), time.perf_counter()
    result = run(model, recipe, Path(output), overwrite=True)
    if result is None:
        return
    wall = time.perf_counter() - start
    measured = {
        "wall_seconds": wall,
        "seconds": result.seconds,
        "reduce_seconds": sum(reducing),
        "tokens": result.tokens,
        "batch_size": result.recipe.data.batch_size,
        "peak_bytes": peak_bytes(),
        "bytes_read": {key: value - read[key] for key, value in _bytes_read().items()},
        "digest": digest(Path(output)),
    }
    print(json.dumps(measured))


def _time_reductions() -> list[float]:
    """Time what several processes do beyond measuring; a list that fills as they do it."""
    seconds: list[float] = []
    reduce = World.reduce

    def timed(world: World, stats: KVStats) -> KVStats:
        if world.size > 1:
            dist.barrier()  # waiting for the slowest is no cost of the reduction
        start = time.perf_counter()
        reduced = reduce(world, stats)
        seconds.append(time.perf_counter() - start)
        return reduced

    World.reduce = timed  # type: ignore[method-assign]
    return seconds


def _bytes_read() -> dict[str, int]:
    """Bytes that read calls returned, and bytes that came from the disk, also by mapped files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {key: int(value) for key, value in (line.split(": ") for line in lines)}
    return {"calls": counts["rchar"], "disk": counts["read_bytes"]}


if __name__ == "__main__":
    main()
