"""From statistics to scales, for a recipe in hand or one saved with a finished calibration."""

from pathlib import Path

from calib.observers import Observer, make_observer
from calib.output import CALIBRATION_FILE
from calib.recipe import Recipe, load_recipe
from calib.scales import KVScales
from calib.stats import KVStats
from calib.stats_file import load_stats
from fp8kv_runtime.fp8 import FP8_DTYPES


def recipe_observer(recipe: Recipe) -> Observer:
    """The observer that `recipe` names, with its options."""
    return make_observer(
        recipe.observer.name,
        percentile=recipe.observer.percentile,
        fp8_dtype=FP8_DTYPES[recipe.fp8_dtype],
    )


def derive_scales(stats: KVStats, recipe: Recipe) -> KVScales:
    """Derive the scales that `recipe` asks for.

    Raises:
        CalibrationError: a layer saw nothing, only zeros, or NaN/Inf.
    """
    return stats.scales(
        strategy=recipe.strategy,
        observer=recipe_observer(recipe),
        fp8_dtype=recipe.fp8_dtype,
        headroom=recipe.headroom,
        targets=recipe.targets,
    )


def load_scales(directory: Path) -> KVScales:
    """Derive the scales of a finished calibration from its statistics and its saved recipe.

    Raises:
        InputError: the directory holds no calibration of ours.
    """
    return derive_scales(load_stats(directory), load_recipe(str(directory / CALIBRATION_FILE)))
