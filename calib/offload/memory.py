"""How much memory this process holds, and how much more the machine can give it."""

import ctypes
import os
import platform
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Resident memory of this process: its own pages and the mapped ones that it has touched."""
    pages = int((_PROC / "self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """What this process can still take: of the machine's memory, or of its container's limit."""
    return max(0, min([_machine_available(), *_container_available()]))


def give_back_free() -> None:
    """Return freed memory to the system, which glibc would keep, in pieces too small for reuse."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _machine_available() -> int:
    lines = (_PROC / "meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def _container_available() -> list[int]:
    group = (_PROC / "self/cgroup").read_text().partition("0::/")[2].strip()
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
