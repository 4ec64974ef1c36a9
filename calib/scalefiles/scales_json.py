"""`kv_cache_scales.json` as it lies there: one scale of K and V per rank and layer.

Format: vLLM 0.4 to 0.6, `quantization/schema.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.scalefiles.json import read_object


@dataclass(frozen=True)
class ScalesJson:
    """The file; None where it says nothing."""

    model_type: str | None
    has_model_type: bool
    dtype: str | None
    ranks: dict[int, dict[int, float]]  # rank -> layer -> scale


def read_scales_json(path: Path) -> ScalesJson:
    """Read the file, whatever its scales are worth.

    Raises:
        InputError: it is no JSON object, or holds no numbers by rank and layer.
    """
    document = read_object(path)
    cache = document.get("kv_cache")
    factors = cache.get("scaling_factor") if isinstance(cache, dict) else None
    if not isinstance(factors, dict):
        raise InputError(f"'{path}' has no kv_cache.scaling_factor")
    ranks = {_index(path, rank): _layers(path, layers) for rank, layers in factors.items()}
    dtype = cache.get("dtype") if isinstance(cache, dict) else None
    model_type = document.get("model_type")
    return ScalesJson(
        model_type if isinstance(model_type, str) else None,
        "model_type" in document,
        dtype if isinstance(dtype, str) else None,
        ranks,
    )


def _layers(path: Path, layers: Any) -> dict[int, float]:
    if not isinstance(layers, dict):
        raise InputError(f"'{path}': a rank holds {str(layers)[:40]!r}, not scales by layer")
    return {_index(path, layer): _number(path, scale) for layer, scale in layers.items()}


def _index(path: Path, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 7):
        raise InputError(f"'{path}': {text[:40]!r} is neither a rank nor a layer")
    return int(text)


def _number(path: Path, value: Any) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        pass
    raise InputError(f"'{path}': a scale is {str(value)[:40]!r}, not a number")
