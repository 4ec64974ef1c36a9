"""What a result depends on besides our code: processor, versions, load, and resident memory.

Runs in other tools' environments too, so it imports nothing that only ours has.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import platform
from collections.abc import Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "fp8kv",
    "llmcompressor",
    "compressed-tensors",
    "nvidia-modelopt",
    "amd-quark",
    "torch",
    "transformers",
)
_PROC = Path("/proc")


def machine(day: str | None = None) -> dict[str, Any]:
    """Describe the machine and the versions; `day` is today unless given."""
    return {
        "date": day or date.today().isoformat(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **_versions()},
    }


_M_MMAP_THRESHOLD = -3  # malloc.h


def reset_peak() -> bool:
    """Give freed memory back and restart the high-water mark; False where the system cannot."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        # large tensors straight from the system and back: a fragmented heap differs by 20 % from
        # run to run, whoever computes
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        libc.malloc_trim(0)
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Return the largest resident memory since `reset_peak`, weights included."""
    status = (_PROC / "self/status").read_text().splitlines()
    line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def laps(clock: list[float]) -> dict[str, float]:
    """Return the seconds of loading, calibrating and writing from the four times around them."""
    seconds = [end - start for start, end in itertools.pairwise(clock)]
    return dict(zip(("load", "calibrate", "write"), seconds, strict=True))


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write `result` as indented JSON, making the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def _cpu_model() -> str:
    info = _PROC / "cpuinfo"
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def scratch_and_output(what: str | None, name: str) -> argparse.Namespace:
    """Read `--scratch` and `--output`, by default of a benchmark of this name."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--scratch", type=Path, default=Path("build") / name)
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / f"{name}.json")
    return parser.parse_args()


def print_figures(models: Mapping[str, Any]) -> None:
    """Print KL and ratios of every model, with their intervals."""
    for name, each in models.items():
        for row, kl in (each["kl"] | each["ratios"]).items():
            print(f"{name}, {row}: {kl['value']:.3g} [{kl['low']:.3g}, {kl['high']:.3g}]")
