"""Does the error grow with the text? KL in bins of the position."""

from typing import Any

import numpy as np

from calib.eval.intervals import Values, as_json, ratio

_FIRST_BIN = 16  # positions; each bin after it ends at twice the position


def kl_by_position(documents: list[Values]) -> list[dict[str, Any]]:
    """Mean KL, with its interval over documents, of the positions `from` to `to` (exclusive)."""
    return [_bin(documents, start, stop) for start, stop in _edges(max(map(len, documents)))]


def _bin(documents: list[Values], start: int, stop: int) -> dict[str, Any]:
    parts = [document[start:stop] for document in documents if len(document) > start]
    sums = np.array([part.sum() for part in parts])
    counts = np.array([float(len(part)) for part in parts])
    figure = as_json(ratio(sums, counts))
    return {"from": start, "to": stop, "tokens": int(counts.sum()), **figure}


def _edges(length: int) -> list[tuple[int, int]]:
    stops = [min(_FIRST_BIN, length)]
    while stops[-1] < length:
        stops.append(min(2 * stops[-1], length))
    return list(zip([0, *stops], stops, strict=False))
