"""How much memory this process holds, and how much more the machine can give it."""

import ctypes
import platform
from pathlib import Path

import psutil

_GROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Resident memory of this process: its own pages and the mapped ones that it has touched."""
    held: int = psutil.Process().memory_info().rss
    return held


def available_bytes() -> int:
    """What this process can still take: of the machine's memory, or of its container's limit."""
    machine: int = psutil.virtual_memory().available
    return max(0, min([machine, *_container_available()]))


def give_back_free() -> None:
    """Return freed memory to the system, which glibc would keep, in pieces too small for reuse."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _container_available() -> list[int]:
    group = _GROUP.read_text().partition("0::/")[2].strip()
    here = _CGROUPS / group
    # the limit may be set on any group above
    return [room for path in (here, *here.parents) if (room := _group_room(path)) is not None]


def _group_room(path: Path) -> int | None:
    try:
        limit = (path / "memory.max").read_text().strip()
        held = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    # cached files are given back when memory is short
    return None if limit == "max" else int(limit) - int(held["anon"])
