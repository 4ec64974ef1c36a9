"""Measure K, V and Q of a language model, derive FP8 KV-cache scales, write them for every engine.

Names resolve on first use, so that importing the package costs nothing.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

# the one home of the version: installed metadata may be of another copy, or of none
__version__ = "0.1.0"

# the stub for type checkers says where each name is, as in lazy_loader's `attach_stub` (SPEC 1)
_STUB = Path(__file__).with_suffix(".pyi").read_text()
_HOMES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'calib' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__  # what completion shows
