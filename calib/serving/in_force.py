"""Compare the scales that an engine computes with, layer by layer, with those in the files."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from calib.scalefiles.reading import FoundLayer, FoundScales, Values
from calib.verify.result import Place

_BF16 = 2**-8  # some engines pass scales through bfloat16


@dataclass(frozen=True)
class LayerInForce:
    """What one attention layer of an engine computes with, on one rank."""

    layer: int
    is_fp8: bool  # whether its cache is
    k: Values
    v: Values


@dataclass
class Report:
    """How many K and V scales are in use, and which layers compute with something else."""

    used: int = 0
    total: int = 0  # of the layers with an FP8 cache
    in_16_bits: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kept = f", {len(self.in_16_bits)} layers in 16 bits" if self.in_16_bits else ""
        counted = f"fp8kv: {self.used} of {self.total} KV scales in use, FP8 cache{kept}"
        return "; ".join([counted, *self.problems])


def compare(
    layers: Sequence[LayerInForce], found: FoundScales | None, place: Place, rank: int = 0
) -> Report:
    """Compare the layers that `rank` holds with the files' scales; None: the files have none."""
    report, wrong = Report(), defaultdict(list)
    files = {each.layer: each for each in found.layers} if found else {}
    for layer in sorted(layers, key=lambda each: each.layer):
        if not layer.is_fp8:
            report.in_16_bits.append(layer.layer)
            continue
        for letter in "kv":
            report.total += 1
            why = _difference(layer, letter, files.get(layer.layer), place, rank)
            if why:
                wrong[letter, why].append(layer.layer)
            else:
                report.used += 1
    if not report.total and files:
        report.problems.append("the cache is not FP8, so no scale is used")
    for (letter, why), indices in wrong.items():
        report.problems.append(f"{letter.upper()} {why} in {_these(indices)}")
    return report


def _difference(
    layer: LayerInForce, letter: str, file: FoundLayer | None, place: Place, rank: int
) -> str:
    """Say what is wrong with a layer's scale; nothing where it is the file's."""
    held: Values = getattr(layer, letter)
    wanted: Values | None = getattr(file, letter) if file else None
    if not wanted:
        return "has no scale in the files and is at 1.0" if _same(held, (1.0,)) else "is not known"
    if len(wanted) > 1:
        wanted = wanted[place.of_rank(rank, len(wanted))]
    if set(wanted) == {1.0}:
        return "is 1.0 in the files, which nobody measured"
    if _same(held, tuple(2 * x for x in wanted)):
        return "" if place.fnuz else "is twice the file's"
    if _same(held, wanted):
        return "is not doubled for an FP8 type that ends at 240" if place.fnuz else ""
    if _same(held, (1.0,)):
        return "is at 1.0: the engine dropped the file's scale"
    return "is not the file's"


def _same(held: Values, wanted: Values) -> bool:
    if len(set(held)) == 1:  # one value for all heads, however it is stored
        held = held[:1] * len(wanted)
    return len(held) == len(wanted) and all(
        abs(a - b) <= _BF16 * b for a, b in zip(held, wanted, strict=True)
    )


def _these(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"layer{'s' if len(indices) > 1 else ''} {shown}{more}"
