"""A finished calibration: its statistics, and the report beside them that sums them up."""

from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.scalefiles.calibrations import read_report, statistics_file
from calib.scalefiles.file_names import CALIBRATION_FILE
from calib.scales.stats import KVStats
from calib.scales.stats_file import load_stats


def load_measured(given: Path) -> tuple[KVStats, dict[str, Any]]:
    """Read both of a calibration's output, or of its statistics file.

    InputError where the statistics are not those that the report is of.
    """
    source = statistics_file(given).parent
    stats, report = load_stats(given), read_report(source)
    said = {row["module"]: (row["k_amax"], row["v_amax"]) for row in report["layers"]}
    found = {n: (float(x.k.amax.max()), float(x.v.amax.max())) for n, x in stats.layers.items()}
    if said != found:
        raise InputError(
            f"the statistics in '{source}' are not those that its {CALIBRATION_FILE} sums up; "
            "calibrate again"
        )
    return stats, report
