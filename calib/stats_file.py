"""`fp8kv_stats.safetensors`: the statistics that travel with a checkpoint.

Tensors are named `<module>.<k|v|q>.<amax|histogram|total|low|high>`; the header's metadata holds,
as JSON, each module's layer index and token count, and which modules share another's cache.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from calib.errors import InputError
from calib.files.calibrations import STATS_FILE as STATS_FILE
from calib.files.calibrations import statistics_file
from calib.scales import SharedAttention
from calib.stats import KVStats, LayerStats, TensorStats
from calib.tensor_file import save_tensors

_KEY = "fp8kv_stats"
_FIELDS = ("amax", "histogram", "total", "low", "high")


def save_stats(stats: KVStats, path: Path, *, progress: dict[str, Any] | None = None) -> None:
    """Write `stats` to the file `path`; `progress` says how far a run has come that goes on."""
    tensors = {
        f"{name}.{which}.{field}": tensor
        for name, layer in stats.layers.items()
        for which in "kvq"
        for field in _FIELDS
        if (tensor := getattr(getattr(layer, which), field)) is not None
    }
    modules = {
        name: {"layer_idx": layer.layer_idx, "tokens": layer.tokens}
        for name, layer in stats.layers.items()
    }
    shared = {name: asdict(module) for name, module in stats.shared.items()}
    # one key, because safetensors writes several in an order that changes from run to run
    facts = {"version": 1, "modules": modules, "shared": shared, "progress": progress}
    save_tensors(tensors, path, {_KEY: json.dumps(facts)})


def load_stats(path: Path) -> KVStats:
    """Read statistics from a file, or from the calibration directory that holds one.

    Raises:
        InputError: there is no such file, or it is not a statistics file.
    """
    stats, _ = load_progress(statistics_file(path))
    return stats


def load_progress(path: Path) -> tuple[KVStats, dict[str, Any]]:
    """Read statistics and the `progress` saved with them.

    Raises:
        InputError: there is no such file, or it is not a statistics file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read statistics '{path}': {error}") from None
    facts = json.loads(metadata.get(_KEY, "{}"))
    if facts.get("version") != 1:
        raise InputError(f"'{path}' is not a {STATS_FILE} of this version")
    shared = {name: SharedAttention(**module) for name, module in facts["shared"].items()}
    layers = {name: _layer(name, layer, tensors) for name, layer in facts["modules"].items()}
    return KVStats(layers, shared), facts.get("progress") or {}


def _layer(name: str, facts: dict[str, int], tensors: dict[str, Tensor]) -> LayerStats:
    def read(which: str) -> TensorStats:
        return TensorStats(*(tensors.get(f"{name}.{which}.{field}") for field in _FIELDS))  # type: ignore[arg-type]

    return LayerStats(facts["layer_idx"], facts["tokens"], read("k"), read("v"), read("q"))
