"""Measured absmax, which scales are compared with: statistics of a calibration, which need torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from calib.files.cache_type import BLOCK_DIVISOR, FP8_DIVISOR, FP8_MAX, Convention
from calib.files.calibration import Amax
from calib.files.stored_scales import StoredLayer

if TYPE_CHECKING:
    from calib.scales.stats_file import Calibration


class MeasuredAmax(NamedTuple):
    """Measured absmax, and how much it tells."""

    amax: Amax
    headroom: float  # of the scales that the calibration made
    warnings: list[str]  # that too little text was read
    thresholds: Amax  # where an observer other than absmax clips, on purpose


def measured_amax(calibration: Calibration, layers: Sequence[StoredLayer]) -> MeasuredAmax:
    """Take the absmax of `layers` out of a calibration's statistics."""
    from calib.scales.stats import derive_scales
    from calib.scales.text_summary import text_warnings

    stats = calibration.stats
    # scales of a layer that shares another's cache may be there, or not
    absent = {module.layer_idx for module in stats.shared.values()} - {layer.layer for layer in layers}
    amax = {key: heads for key, heads in stats.amax_by_head().items() if key[0] not in absent}
    recipe, thresholds = calibration.recipe() if calibration.report else None, Amax()
    if recipe and recipe.observer.name != "absmax":
        largest = FP8_MAX[recipe.fp8_dtype]
        scales = derive_scales(stats, recipe).layers
        pairs = [(layer.layer_idx, layer) for layer in scales.values()]
        pairs += [(module.layer_idx, scales[module.owner]) for module in stats.shared.values()]
        thresholds = {
            (index, letter): tuple((scale.flatten() * largest).tolist())
            for index, layer in pairs
            for letter, scale in layer.items()
        }
    headroom = 1.0 if recipe is None or recipe.headroom == "auto" else recipe.headroom
    return MeasuredAmax(amax, headroom, text_warnings(stats.text, stats.tokens), thresholds)


def measured_convention(
    convention: Convention, layers: Sequence[StoredLayer], amax: Amax
) -> tuple[Convention, list[str]]:
    """Return the convention that measured absmax shows, and a problem where that of the files differs."""
    ratios = [
        max(amax[layer.layer, letter]) / max(values)
        for layer in layers
        for letter in "kv"
        if max(values := layer.values(letter), default=0) > 0 and (layer.layer, letter) in amax
    ]
    if not ratios:
        return convention, []
    divisor = BLOCK_DIVISOR if median(ratios) ** 2 > FP8_DIVISOR * BLOCK_DIVISOR else FP8_DIVISOR
    if divisor == convention.divisor:
        return convention, []
    measured = Convention(divisor, "as the statistics show")
    return measured, [f"the values are {measured}, and not {convention}"] if convention.divisor else []
