"""What scales are compared with: the statistics of a calibration. Its reader needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from calib.recipe import load_recipe
from calib.scalefiles.calibrations import Amax, statistics_file
from calib.scalefiles.file_names import CALIBRATION_FILE
from calib.scalefiles.reading import FoundLayer

if TYPE_CHECKING:
    from calib.scales.stats import KVStats


class Measured(NamedTuple):
    """Measured absmax, and how much it tells."""

    amax: Amax
    headroom: float = 1.0  # of the scales that the calibration made
    warnings: tuple[str, ...] = ()  # that too little text was read


def read_measured(path: Path, layers: Sequence[FoundLayer]) -> Measured:
    """Read statistics that the scales of `layers` are compared with."""
    from calib.scales.stats_file import load_stats

    return measured_of(load_stats(path), path, layers)


def measured_of(stats: KVStats, path: Path, layers: Sequence[FoundLayer]) -> Measured:
    """Return what `stats`, read from `path`, hold of `layers`."""
    from calib.scales.text_summary import text_warnings

    # scales of a layer that shares another's cache may be there, or not
    absent = {each.layer_idx for each in stats.shared.values()} - {each.layer for each in layers}
    amax = {at: heads for at, heads in stats.amax_by_head().items() if at[0] not in absent}
    file = statistics_file(path).parent / CALIBRATION_FILE
    headroom = load_recipe(str(file)).headroom if file.exists() else 1.0
    warnings = tuple(text_warnings(stats.text, stats.tokens))
    return Measured(amax, 1.0 if headroom == "auto" else headroom, warnings)
