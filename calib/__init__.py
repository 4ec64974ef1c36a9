"""Measure K, V and Q of a language model, derive FP8 KV-cache scales, write them for every engine.

Names resolve on first use, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import Any

# the one home of the version: installed metadata may be of another copy, or of none
__version__ = "0.1.0"

_HOMES = {
    "CalibrationError": "calib.errors",
    "Fp8kvError": "calib.errors",
    "InputError": "calib.errors",
    "KVScales": "calib.scales.scales",
    "KVStats": "calib.scales.stats",
    "LayerScales": "calib.scales.scales",
    "Recipe": "calib.recipe",
    "UnsupportedExportError": "calib.errors",
    "UnsupportedModelError": "calib.errors",
    "calibrate": "calib.capture.loop",
    "derive_scales": "calib.scales.stats",
    "load_recipe": "calib.recipe",
    "load_scales": "calib.scales.stats_file",
    "load_stats": "calib.scales.stats_file",
    "run": "calib.job",
    "save_stats": "calib.scales.stats_file",
    "scales_for": "calib.capture.training",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'calib' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__  # what completion shows
