"""Statistics without the first token of every sample, which engines see once per sequence."""

from dataclasses import replace

import torch

from calib.errors import InputError
from calib.scales.stats import KVStats, LayerStats, TensorStats


def without_first_tokens(stats: KVStats) -> KVStats:
    """The amax of K and V of each head over all positions but the first, [H, 1]; nothing else.

    A head that has nothing there keeps its amax. An InputError where positions are not known.
    """
    return KVStats({name: _rest(x) for name, x in stats.layers.items()}, stats.shared, stats.text)


def _rest(layer: LayerStats) -> LayerStats:
    return replace(layer, k=_later(layer.k), v=_later(layer.v))


def _later(tensor: TensorStats) -> TensorStats:
    if tensor.positions is None:
        raise InputError("these statistics do not say where amax was seen; calibrate again")
    rest = tensor.positions[:, 1:].amax(1, keepdim=True)
    return TensorStats(torch.where(rest > 0, rest, tensor.amax.amax(1, keepdim=True)))
