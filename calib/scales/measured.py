"""A finished calibration: its statistics, and the report beside them that sums them up."""

from pathlib import Path
from typing import Any

from calib.files.calibration import read_report, statistics_file
from calib.scales.stats import KVStats
from calib.scales.stats_file import load_stats


def load_measured(given: Path) -> tuple[KVStats, dict[str, Any]]:
    """Read both of a calibration's output, or of its statistics file."""
    return load_stats(given), read_report(statistics_file(given).parent)
