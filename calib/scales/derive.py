"""Scales derived from statistics as a recipe asks."""

import os

from calib.arguments import check_arguments, to_path
from calib.files.names import CALIBRATION_FILE
from calib.recipe import Recipe, load_recipe
from calib.scales.observers import make_observer
from calib.scales.scales import KVScales
from calib.scales.stats import KVStats
from calib.scales.stats_file import load_stats


@check_arguments
def derive_scales(stats: KVStats, recipe: Recipe) -> KVScales:
    """Derive the scales that `recipe` asks for; raises as `KVStats.scales` does."""
    return stats.scales(
        strategy=recipe.strategy,
        observer=make_observer(recipe.observer, recipe.fp8_dtype),
        fp8_dtype=recipe.fp8_dtype,
        headroom=1.0 if recipe.headroom == "auto" else recipe.headroom,
        clip_chance=recipe.clip_chance if recipe.headroom == "auto" else None,
        rounding=recipe.scale_rounding,
        targets=recipe.targets,
        center_keys=recipe.center_keys,
    )


@check_arguments
def load_scales(directory: str | os.PathLike[str]) -> KVScales:
    """Derive the scales of a finished calibration from its statistics and its saved recipe."""
    return derive_scales(load_stats(directory), load_recipe(to_path(directory) / CALIBRATION_FILE))
