"""The scales of a directory by layer, and what is wrong with them whatever the engine."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from calib.errors import InputError
from calib.scalefiles.file_names import JSON_FILE
from calib.scalefiles.folder import ScaleDirectory, ScaleTensor

Values = tuple[float, ...]
# no |K| or |V| that a model computes comes from so small a scale: memory that nobody filled
_UNINITIALISED = 1e-20
# nor from so large a one
_HUGE = 1e6


@dataclass
class LayerScalesFound:
    """The scales of one layer, as one engine or another would read them."""

    layer: int
    k: Values | None = None
    v: Values | None = None
    q: Values | None = None
    tensors: list[ScaleTensor] = field(default_factory=list)


def layers_of(directory: ScaleDirectory) -> list[LayerScalesFound]:
    """The scales by layer; of several tensors that say the same the more specific is taken.

    Raises:
        InputError: the directory holds no scales.
    """
    found: dict[int, LayerScalesFound] = defaultdict(lambda: LayerScalesFound(-1))
    # a scale of both K and V first, so that one of K alone replaces it
    for tensor in sorted(directory.tensors, key=lambda t: (-len(t.parsed.letters), t.name)):
        layer = found[tensor.parsed.layer]
        layer.tensors.append(tensor)
        for letter in tensor.parsed.letters:
            setattr(layer, letter, tensor.values)
    if not found and directory.json:
        for layers in directory.json.ranks.values():
            for index, scale in layers.items():
                # ranks hold different heads: one scale for all of them is the largest
                largest = max(scale, *(found[index].k or (scale,)))
                found[index].k = found[index].v = (largest,)
    if not found:
        raise no_scales(directory.path)
    for index, layer in found.items():
        layer.layer = index
    return [found[index] for index in sorted(found)]


def no_scales(path: Path) -> InputError:
    """What to say of a directory without scales."""
    return InputError(
        f"'{path}' holds no KV-cache scales: no tensor such as "
        f"'model.layers.0.self_attn.k_scale', no {JSON_FILE}; give the output of a calibration"
    )


def value_problems(layers: list[LayerScalesFound]) -> list[str]:
    """What no engine can do anything sensible with, one line each."""
    problems = []
    for letter in "kvq":
        wrong: dict[str, list[int]] = defaultdict(list)
        for layer in layers:
            values = getattr(layer, letter)
            if values and (kind := _kind(values)):
                wrong[kind].append(layer.layer)
        name = letter.upper()
        problems += [f"{name} scales {kind} in {_these(each)}" for kind, each in wrong.items()]
        every = [value for layer in layers for value in getattr(layer, letter) or ()]
        if len(layers) > 1 and every and set(every) == {1.0}:
            problems.append(f"{name} scales are all 1.0: nothing was measured")
    counts = Counter(bool(layer.k) + 2 * bool(layer.v) for layer in layers)
    if counts[1]:
        problems.append(f"{counts[1]} layers have a K scale and no V scale")
    if counts[2]:
        problems.append(f"{counts[2]} layers have a V scale and no K scale")
    return problems


def _kind(values: Values) -> str | None:
    if any(math.isnan(value) for value in values):
        return "are NaN"
    if any(math.isinf(value) for value in values):
        return "are infinite"
    if any(value < 0 for value in values):
        return "are negative"
    if any(value == 0 for value in values):
        return "are zero"
    if any(value < _UNINITIALISED or value > _HUGE for value in values):
        return "look like memory that nobody wrote"
    return None


def _these(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"layer{'s' if len(indices) > 1 else ''} {shown}{more}"
