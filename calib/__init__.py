"""Measure K, V and Q of a language model, derive FP8 KV-cache scales, write them for every engine.

Names resolve on first use, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "KVScales": "calib.scales",
    "KVStats": "calib.stats",
    "LayerScales": "calib.scales",
    "Recipe": "calib.recipe",
    "calibrate": "calib.measure",
    "derive_scales": "calib.derive",
    "load_recipe": "calib.recipe",
    "load_scales": "calib.derive",
    "load_stats": "calib.stats_file",
    "run": "calib.job",
    "save_stats": "calib.stats_file",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'calib' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
