"""Statistics of a given absmax, as a calibration of many tokens writes them."""

import torch

from calib.scales.stats import KVStats, LayerStats, TensorStats
from calib.scales.stats_file import save_stats


def save_amax(amax, directory, tokens=2048):
    """Write `amax`, by layer and letter: a number per head, or heads by channels."""
    directory.mkdir(exist_ok=True)
    layers = {}
    for i in sorted({layer for layer, _ in amax}):
        of = {x: torch.as_tensor(amax.get((i, x), [1.0]), dtype=torch.float32) for x in "kvq"}
        parts = (TensorStats(x if x.dim() == 2 else x[:, None]) for x in of.values())
        layers[f"model.layers.{i}.self_attn"] = LayerStats(i, tokens, *parts)
    save_stats(KVStats(layers), directory / "fp8kv_stats.safetensors")
    return directory
