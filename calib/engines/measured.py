"""What scales are compared with: the statistics of a calibration. Its reader needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from calib.files.cache_type import BLOCK_DIVISOR, FP8_DIVISOR, FP8_MAX, Convention
from calib.files.calibration import Amax, statistics_file
from calib.files.names import CALIBRATION_FILE
from calib.files.stored_scales import StoredLayer
from calib.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from calib.scales.stats import KVStats


class Measured(NamedTuple):
    """Measured absmax, and how much it tells."""

    amax: Amax
    headroom: float = 1.0  # of the scales that the calibration made
    warnings: tuple[str, ...] = ()  # that too little text was read
    thresholds: Amax | None = None  # what the calibration's observer clips at, on purpose


def read_measured(path: Path, layers: Sequence[StoredLayer]) -> Measured:
    """Read statistics that the scales of `layers` are compared with."""
    from calib.scales.stats_file import load_stats

    return measured_of(load_stats(path), path, layers)


def measured_of(stats: KVStats, path: Path, layers: Sequence[StoredLayer]) -> Measured:
    """Return what `stats`, read from `path`, hold of `layers`."""
    from calib.scales.text_summary import text_warnings

    # scales of a layer that shares another's cache may be there, or not
    absent = {each.layer_idx for each in stats.shared.values()} - {each.layer for each in layers}
    amax = {at: heads for at, heads in stats.amax_by_head().items() if at[0] not in absent}
    file = statistics_file(path).parent / CALIBRATION_FILE
    recipe = load_recipe(str(file)) if file.exists() else None
    headroom = 1.0 if recipe is None or recipe.headroom == "auto" else recipe.headroom
    warnings = tuple(text_warnings(stats.text, stats.tokens))
    thresholds = None
    if recipe is not None and recipe.observer.name != "absmax":
        thresholds = _thresholds(stats, recipe)
    return Measured(amax, headroom, warnings, thresholds)


def measured_convention(
    told: Convention, layers: Sequence[StoredLayer], amax: Amax
) -> tuple[Convention, list[str]]:
    """Return the convention that measured absmax shows, and a problem where the files tell another."""
    ratios = [
        max(amax[layer.layer, letter]) / max(values)
        for layer in layers
        for letter in "kv"
        if max(values := layer.values(letter), default=0) > 0 and (layer.layer, letter) in amax
    ]
    divisor = None
    if ratios:
        divisor = BLOCK_DIVISOR if median(ratios) ** 2 > FP8_DIVISOR * BLOCK_DIVISOR else FP8_DIVISOR
    if divisor in (None, told.divisor):
        return told, []
    measured = Convention(divisor, "as the statistics show")
    return measured, [f"the values are {measured}, and not {told}"] if told.divisor else []


def _thresholds(stats: KVStats, recipe: Recipe) -> Amax:
    """Return the largest values that the scales of `recipe` hold."""
    from calib.scales.stats import derive_scales

    largest = FP8_MAX[recipe.fp8_dtype]
    scales = derive_scales(stats, recipe).layers
    layers = [(layer.layer_idx, layer) for layer in scales.values()]
    layers += [(each.layer_idx, scales[each.owner]) for each in stats.shared.values()]
    return {
        (index, letter): tuple((scale.flatten() * largest).tolist())
        for index, layer in layers
        for letter, scale in layer.items()
    }
