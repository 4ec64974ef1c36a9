"""Measured absmax from `fp8kv_stats.safetensors`, read without torch."""

import math
import re
from pathlib import Path

from calib.errors import InputError
from calib.scalefiles.calibrations import statistics_file
from calib.scalefiles.file_names import STATS_FILE
from calib.scalefiles.header import read_header, read_values

_AMAX = re.compile(r".+\.(?P<layer>\d{1,6})\..+\.(?P<letter>[kvq])\.amax")

Amax = dict[tuple[int, str], tuple[float, ...]]  # (layer, "k" | "v" | "q") -> one per head


def read_amax(path: Path) -> Amax:
    """The largest magnitude of each layer and head.

    Raises:
        InputError: it is no statistics file, nor a directory that holds one, or it holds NaN/Inf.
    """
    path = statistics_file(path)
    found: Amax = {}
    for name, entry in read_header(path).items():
        match = _AMAX.fullmatch(name)
        if match and len(entry.shape) == 2:
            heads, channels = entry.shape
            values = read_values(path, entry)
            if not all(map(math.isfinite, values)):
                raise InputError(
                    f"'{path}': {match['letter'].upper()} of layer {match['layer']} held NaN or "
                    "Inf, so nothing can be compared with it; calibrate again"
                )
            rows = [values[i * channels : (i + 1) * channels] for i in range(heads)]
            found[int(match["layer"]), match["letter"]] = tuple(max(row, default=0) for row in rows)
    if not found:
        raise InputError(f"'{path}' holds no statistics; give {STATS_FILE} of a calibration")
    return found
