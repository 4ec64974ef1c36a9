"""What became of the scales that a model of an engine was given."""

import re
from collections.abc import Iterable

from calib.errors import one_line

Scale = tuple[float, ...]  # one, or one of every KV head
Pair = tuple[Scale, Scale]  # K's and V's
# attention layer -> what it computes with; None where it has no place for scales
Held = dict[str, Pair | None]
NOT_FP8: Pair = ((), ())  # of a layer whose cache keeps 16 bits
LONGEST = 160  # of a reason

# what one layer computes with; all layers like this make a fate
LOADED = "loaded"
DROPPED = {
    "at 1.0": "dropped",
    "without a place": "no place",
    "with a 16-bit cache": "dropped: the cache keeps 16 bits",
}
AT_ONE, NO_PLACE, SIXTEEN_BITS = DROPPED


def fate(expected: list[Pair], held: Held) -> str:
    """What became of the scales: `expected` in the order of the layers."""
    layers = [held[name] for name in natural(held)]
    found = {_without_scale(layer) for layer in layers}
    if None not in found:
        return DROPPED[found.pop()] if len(found) == 1 else "dropped"
    if len(layers) != len(expected):
        return f"partly: {len(layers)} attention layers for {len(expected)} pairs of scales"
    states = [_state(own, layer, expected) for own, layer in zip(expected, layers, strict=True)]
    if {*states} == {LOADED}:
        return LOADED
    counts = {state: states.count(state) for state in sorted({*states})}
    if len(counts) == 1:
        return f"partly: all {states[0]}"
    return "partly: " + ", ".join(f"{n} of {len(states)} {state}" for state, n in counts.items())


def _without_scale(layer: Pair | None) -> str | None:
    if layer is None:
        return NO_PLACE
    if layer == NOT_FP8:
        return SIXTEEN_BITS
    return AT_ONE if {*layer[0], *layer[1]} == {1.0} else None


def _state(own: Pair, layer: Pair | None, expected: list[Pair]) -> str:
    if layer == own:
        return LOADED
    if without := _without_scale(layer):
        return without
    if layer == (own[1], own[0]):
        return "with K and V crossed"
    if layer in expected:
        return "with another layer's scales"
    right = [letter for letter, a, b in zip("KV", own, layer or (), strict=True) if a == b]
    return f"with {right[0]} alone" if right else "with a wrong value"


def natural(names: Iterable[str]) -> list[str]:
    """Sorted, numbers by their value."""
    return sorted(names, key=_parts)


def _parts(name: str) -> list[str | int]:
    # text and numbers take turns, so that like is compared with like
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def reason(kind: str, error: BaseException) -> str:
    """`crash: KeyError: ...`: the first sentence, without paths, modules and classes' names.

    Of a long one the last clause that is cut is left out.
    """
    text = re.sub(r"(?:/[\w.+-]+){2,}", "...", " ".join(str(error).split()))
    text = re.sub(r"'(?:\w+\.)+(\w+)'", r"'\1'", text)
    text = re.sub(r" in [A-Z]\w+", "", text).partition(". ")[0].partition(" [type=")[0]
    text = one_line(f"{type(error).__name__}: {text}", LONGEST)
    return f"{kind}: " + re.sub(r"(?<=.{40})[;,:] [^;,:]* \.\.\.$", "", text)
