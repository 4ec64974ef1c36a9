"""Is an engine's traffic of this model? Its statistics have no marks of weights, by which others are told."""

from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from calib.errors import Fp8kvError, InputError
from calib.evaluate.served.watch_report import METRICS, check_served, read_expected, read_watched, report_on
from calib.files.cache_type import FP8_MAX
from calib.files.calibration import Amax
from calib.files.model_directory import open_model_directory
from calib.files.names import WATCH_FILE
from calib.files.stored_scales import StoredScales, is_usable
from calib.files.text import parse_condition, show_layers
from calib.same_model.check import ModelFacts, model_facts
from calib.scales.stats import KVStats
from calib.scales.stats_file import Calibration, load_stats, open_calibration

# random tokens beside prose change most absmax by a sixth (SmolLM2), and estimates of what a cache clipped
# are at most 4 times its range
_LARGE_FACTOR = 4.0
_BEYOND = 1.1  # times where the last code begins: no magnitude of that code, however it is rounded
_CLIPPED = parse_condition("clipped>0", METRICS)


def check_traffic(traffic: Calibration, model: ModelFacts, stored: StoredScales) -> list[str]:
    """Refuse statistics that are surely of another model; return a warning where that may be."""
    _check_served(traffic, model)
    return _check_range(traffic, stored)


def open_measured(path: Path, directory: Path) -> tuple[Calibration, list[str]]:
    """Open a calibration, or an engine's traffic, to judge the scales in `directory` by, and notes on it.

    Traffic of another model is refused, where both models can be read; see `settle_estimates`.
    """
    calibration = open_calibration(path, needs_report=False)
    layers, model = calibration.stats.layers, None
    with suppress(Fp8kvError, OSError):
        model = model_facts(open_model_directory(directory, needs_scales=False), layers)
    if model:
        _check_served(calibration, model)
    return settle_estimates(calibration, directory)


def _check_served(traffic: Calibration, model: ModelFacts) -> None:
    """Refuse traffic of an engine that serves another model, if that is here and its weights can be read."""
    if (traffic.directory / WATCH_FILE).is_file():
        served = read_watched(traffic.directory).model
        problem = f"'{traffic.path}' is traffic of '{served}'"
        check_served(served, model, traffic.stats.layers, problem, "give that of this model")


def _check_range(traffic: Calibration, stored: StoredScales) -> list[str]:
    """Refuse traffic whose absmax is far from that of the statistics beside the scales, if there are any.

    Without these, scales that are far from it may themselves be wrong: return a warning.
    """
    path, directory, amax = traffic.path, stored.directory.path, traffic.stats.amax_by_head()
    try:
        own = _exact_amax(load_stats(directory))
    except InputError:  # without, or damaged
        values = {(layer.layer, letter): layer.values(letter) for layer in stored.layers for letter in "kv"}
        right = {
            place: scales for place, scales in values.items() if is_usable(scales) and {*scales} != {1.0}
        }
        if _median_factor(amax, right, FP8_MAX[stored.fp8_dtype]) < _LARGE_FACTOR:
            return []
        return [
            f"most scales are more than {_LARGE_FACTOR:g} times off what '{path}' measured; see that it is "
            "of this model"
        ]
    exact = _exact_amax(traffic.stats)
    if not exact.keys() & own.keys():
        problem = f"'{path}' cannot be compared with '{directory}', as a cache clipped every layer"
        return [f"{problem}; see that it is of this model"]
    if _median_factor(exact, own) < _LARGE_FACTOR:
        return []
    raise InputError(
        f"'{path}' is of another model: most K and V differ by more than {_LARGE_FACTOR:g} times from the "
        f"statistics in '{directory}'; give statistics of this model"
    )


def settle_estimates(traffic: Calibration, directory: Path) -> tuple[Calibration, list[str]]:
    """Return `traffic` without estimates that the calibration in `directory` makes superfluous, and notes.

    Its own largest value is taken where it expects as many tokens in the last code, as tokens that return
    again and again have it, and where the cache's range ends below it: it was measured, beyond that end.
    The traffic of others, or without such a calibration, stays as it is.
    """
    is_estimate = any(layer.estimated for layer in traffic.stats.layers.values())
    if not (is_estimate and (traffic.directory / WATCH_FILE).is_file()):
        return traffic, []
    try:
        watched = read_watched(traffic.directory)
        expected, _ = read_expected(directory, watched)
        own = {layer.layer_idx: layer for layer in load_stats(directory).layers.values()}
    except (Fp8kvError, OSError):
        return traffic, []
    rows = {(row.layer, row.letter): row for row in report_on(watched, _CLIPPED, expected).rows}
    layers, notes, exceeded = dict(traffic.stats.layers), list[str](), defaultdict[str, list[int]](list)
    for name, layer in traffic.stats.layers.items():
        for letter in layer.estimated:
            place, part = (layer.layer_idx, letter.upper()), getattr(layer, letter)
            if place not in rows or layer.layer_idx not in own:
                continue
            row, largest = rows[place], getattr(own[layer.layer_idx], letter).amax
            ends = watched.limits.get(place, part.amax.amax(1))[:, None]
            at_end = (part.amax >= ends).any(1)
            if row.is_expected:
                amax = torch.minimum(part.amax, largest)
                notes.append(
                    f"layer {row.layer}'s {row.letter}: {row.clipped:.2%} of the tokens are at the end of the"
                    f" range, {row.expected:.2%} were expected; its largest value in the calibration is taken"
                )
            elif (largest > _BEYOND * ends).any(1)[at_end].all():
                amax = torch.where(at_end[:, None], largest, part.amax)
                exceeded[row.letter].append(row.layer)
            else:
                continue
            part = replace(part, amax=amax, least=None)
            marks = layers[name].estimated, layers[name].unbounded
            estimated, unbounded = (tuple(x for x in mark if x != letter) for mark in marks)
            layers[name] = replace(layers[name], **{letter: part}, estimated=estimated, unbounded=unbounded)
    why = "the calibration's largest values, beyond the range of the watched cache, are taken"
    notes += [f"{letter} of {show_layers(indices)}: {why}" for letter, indices in exceeded.items()]
    return traffic.replace_stats(replace(traffic.stats, layers=layers)), notes


def _exact_amax(stats: KVStats) -> Amax:
    """Return the absmax of layers that no cache has clipped: that of others is capped."""
    layers = {name: layer for name, layer in stats.layers.items() if not layer.estimated}
    shared = {name: module for name, module in stats.shared.items() if module.owner in layers}
    return replace(stats, layers=layers, shared=shared).amax_by_head()


def _median_factor(amax: Amax, amax_before: Amax, factor: float = 1.0) -> float:
    """Return the factor by which most absmax differ, up or down, from `amax_before` times `factor`."""
    pairs = [(max(amax[x]), factor * max(amax_before[x])) for x in amax.keys() & amax_before.keys()]
    return median([max(a / b, b / a) for a, b in pairs if a > 0 and b > 0] or [1.0])
