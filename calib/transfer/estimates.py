"""What an engine's cache clipped is estimated; a calibration of the same model can tell it."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from calib.errors import Fp8kvError
from calib.evaluate.served.watch_report import METRICS, WatchReport, read_expected, read_watched, report_on
from calib.files.names import WATCH_FILE
from calib.files.text import parse_condition, show_layers
from calib.scales.stats import KVStats, LayerStats
from calib.scales.stats_file import Calibration, load_stats

_BEYOND = 1.1  # times where the last code begins: no magnitude of that code, however it is rounded
_CLIPPED = parse_condition("clipped>0", METRICS)


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
    stats, notes = _settle(traffic.stats, own, report_on(watched, _CLIPPED, expected))
    return traffic.replace_stats(stats), notes


def _settle(stats: KVStats, own: dict[int, LayerStats], report: WatchReport) -> tuple[KVStats, list[str]]:
    """Put largest values of a calibration's `own` layers in the place of estimates, and say where."""
    layers, notes, exceeded = dict(stats.layers), list[str](), defaultdict[str, list[int]](list)
    rows = {(row.layer, row.letter): row for row in report.rows if row.layer in own}
    for name, layer in stats.layers.items():
        for letter in layer.estimated:
            place, part = (layer.layer_idx, letter.upper()), getattr(layer, letter)
            if place not in rows:
                continue
            row, largest = rows[place], getattr(own[layer.layer_idx], letter).amax
            ends = report.watched.limits.get(place, part.amax.amax(1))[:, None]
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
    return replace(stats, layers=layers), notes
