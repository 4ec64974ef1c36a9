"""Where and when a report was measured."""

import platform
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from calib.report import versions

_CPU_INFO = Path("/proc/cpuinfo")


def conditions(device: str) -> dict[str, Any]:
    """Versions, the machine that the model was on, and the time in UTC."""
    return {
        "versions": versions(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else _cpu(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu() -> str:
    # Linux alone leaves `platform.processor()` empty, or says no more than x86_64
    text = _CPU_INFO.read_text(errors="replace") if _CPU_INFO.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()
