"""Whether the scales of one checkpoint fit another: its K and V must be the same, or it is refused.

What quantisation changes in a weight is noise: it leaves a row's size as it was. A tool that moves
factors between weights changes the size of rows, and with them the range of K or V.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from calib.errors import InputError
from calib.same_model.probing import signs
from calib.same_model.record import PROBES, Mark, Marks
from calib.same_model.taking import is_cached, is_embedding, is_output, norm_of

# of vectors and embeddings: rounding to bfloat16 differs by 0.4 %
_SAME = 0.01
# relative error of a weight in so many bits at most, and a margin. A value of normally distributed
# weights has 2.6 % (FP8), 1 % (INT8), 11 % (4 bits in groups of 128), 25 % (3 bits)
_NOISE = {16: 0.005, 8: 0.06, 6: 0.2, 5: 0.25, 4: 0.35, 3: 0.5}
_MOVED = {**_NOISE, 8: 0.15}  # where factors were moved into it before it was quantised
# by which the size of any row may differ, and of the median one, beside its own noise: less than
# what would matter in a scale
_ROW, _MEDIAN = 0.03, 0.02
# beside those for K and V; AWQ moves factors from the rows of `up_proj` into `down_proj`
_SIZED = re.compile(r".*\b(?:q_proj|gate_proj|w1)\.weight")
# standard deviations of what probes see of that noise
_ROW_DEVIATIONS, _MEDIAN_DEVIATIONS = 4, 2
# An input that makes more than this part of what rows give is compared apart: a trained norm may
# enlarge one channel a hundred times, and the rounding of one weight then looks like a factor.
# Below it the noise of a row is that of at least eight weights, which `_ROW_DEVIATIONS` allow for.
_LARGE = 1 / 8
_MOST_LARGE = 8  # of them, of 64 probes
_RECORDED = 2**-8  # two marks are each rounded to bfloat16, relative to the whole of a row
# half a step of E4M3, which a row takes over where one value is nearly all of it
_FLOAT_STEP = 2**-4


@dataclass(frozen=True)
class Likeness:
    """How far two checkpoints of one model are apart."""

    layers_with_moved_factors: int  # from norms into weights
    largest_error: float  # of a weight for K and V, relative
    largest_factor: float  # that the size of a row of these differs by, less 1


def judge(given: str, base: Marks, model: str, found: Marks) -> Likeness:
    """Compare marks of the checkpoint that scales were measured on with those of another.

    InputError, with `given` and `model` to name them, unless K and V are the same.
    """
    if base.layers != found.layers:
        raise InputError(
            f"'{given}' is of another model: it has {base.layers} layers, and '{model}' {found.layers} layers"
        )
    check_settings(given, base.settings, model, found.settings)
    if not any(map(is_cached, base.tensors)):
        raise InputError(f"the marks of '{given}' are damaged (no weight is of K or V)")
    pair = _Pair(given, base.tensors, model, found.tensors)
    pair.check_shapes()
    moved = pair.moved()
    seen = pair.compare_matrices(moved)
    layers = {".".join(norm.split(".")[:2]) for norm in moved}
    errors, factors = zip(*seen, strict=True)
    return Likeness(len(layers), max(errors), max(factors))


def check_settings(given: str, base: Mapping[str, Any], model: str, found: Mapping[str, Any]) -> None:
    """Refuse configs by which one set of weights gives another K and V."""
    for key in sorted(base.keys() & found.keys()):
        mine, other = base[key], found[key]
        if mine != other:
            raise InputError(
                f"'{given}' is of another model: its config says {key} {mine!s:.200}, that of "
                f"'{model}' {other!s:.200}"
            )


@dataclass(frozen=True)
class _Pair:
    given: str
    base: Mapping[str, Mark]
    model: str
    found: Mapping[str, Mark]

    def check_shapes(self) -> None:
        """Refuse tensors that one has and the other lacks, or has in another shape."""
        for mine, others, which in (
            (self.base, self.found, "model that was measured"),
            (self.found, self.base, "second"),
        ):
            for name, mark in mine.items():
                needed = len(mark.shape) == 1 or is_cached(name) or is_embedding(name)
                # a bias of zeros is none
                if name not in others and needed and mark.values.any():
                    raise self._another(f"'{name}' is only in the {which}")
        for name in self.base.keys() & self.found.keys():
            mark, other = self.base[name], self.found[name]
            if _sizes(name, mark) != _sizes(name, other):
                raise self._another(f"'{name}' is {[*mark.shape]} there and {[*other.shape]} here")

    def moved(self) -> set[str]:
        """Norms whose factors differ; InputError for other vectors and the embedding."""
        moved = set()
        norms = {norm_of(n, self.base) for n, m in self.base.items() if len(m.shape) == 2}
        for name in self.base.keys() & self.found.keys():
            mark, other, norm = self.base[name], self.found[name], name.rpartition(".")[0]
            is_alone = len(mark.shape) == 1 or is_embedding(name)
            allowed = _SAME if mark.bits == other.bits == 16 else _noise(mark, other)
            if is_alone and _difference(mark.values, other.values) > allowed:
                if norm not in norms:
                    raise self._another(f"'{name}' differs, which quantisation leaves alone")
                moved.add(norm)
        return moved

    def compare_matrices(self, moved: set[str]) -> list[tuple[float, float]]:
        """The error and the largest factor of each weight for K and V; InputError for another one.

        All other marked weights must be the same, too, and make up for the norms that `moved`.
        """
        seen = []
        matrices = [n for n, m in self.base.items() if len(m.shape) == 2 and not is_embedding(n)]
        for name in sorted(matrices, key=is_cached, reverse=True):
            how = "norms differ, and " if norm_of(name, self.base) in moved else ""
            if name in self.found:
                seen += [self._compare(name, how)] * is_cached(name)
            elif how:
                raise self._refuse(f"{how}'{name}', which reads one, cannot be compared")
        return seen

    def _compare(self, name: str, how: str) -> tuple[float, float]:
        mark, other = self.base[name], self.found[name]
        large = _large_inputs(mark)
        apart, other_apart = _along(mark.values, large), _along(other.values, large)
        rest = mark.values - apart
        factors, errors = _factors(rest, other.values - other_apart)
        size = rest.norm(dim=1, keepdim=True).clamp(min=1e-19)
        beyond = errors
        if large.shape[1]:  # what rounded marks leave of the rest is no error
            whole = mark.values.norm(dim=1) / size[:, 0]
            beyond = (errors - _RECORDED * whole * factors.abs().clamp(min=1)).clamp(min=0)
        error = float(beyond.square().mean().sqrt())
        if mark.bits == other.bits == 16 or is_cached(name):  # of others two weights are too few
            was, became = apart / size, other_apart / size
            # as it was, or larger like the rest of its row, which is known less well
            ways = (torch.ones_like(factors), factors)
            error = max(error, min(_difference(was * way[:, None], became) for way in ways))
        if error > _noise(mark, other, _MOVED if how else _NOISE):
            raise self._refuse(f"{how}'{name}' is {error:.0%} from what it was, more than rounding")
        if is_cached(name) or is_output(name) or _SIZED.fullmatch(name):
            self._check_sizes(name, factors, errors, _step(mark) + _step(other), how)
        return error, float((factors - 1).abs().max())

    def _check_sizes(self, name: str, factors: Tensor, errors: Tensor, step: float, how: str) -> None:
        """Refuse a matrix whose rows have become larger or smaller by more than their noise."""
        off, seen = (factors - 1).abs(), errors / PROBES**0.5
        beyond = off - (_ROW + step + _ROW_DEVIATIONS * seen)
        # codes that fit best are smaller than what they stand for, by the square of their error
        usual = _MEDIAN + _MEDIAN_DEVIATIONS * seen.median() + errors.median().square()
        if (beyond > 0).any() or off.median() > usual:
            worst = float(factors[beyond.argmax()])
            why = f"{how}a row of '{name}' is {worst:.2f} times what it was"
            if name.endswith("v_proj.weight"):
                why += ", as where AWQ moves factors between V and the output projection"
            raise self._refuse(why)

    def _another(self, why: str) -> InputError:
        return InputError(f"'{self.given}' is of another model than '{self.model}': {why}")

    def _refuse(self, why: str) -> InputError:
        return InputError(
            f"the scales of '{self.given}' do not fit '{self.model}': {why}; calibrate that model"
        )


def _sizes(name: str, mark: Mark) -> tuple[int, ...]:
    """What must be equal; an embedding may have grown by tokens."""
    shape = mark.shape[1:] if is_embedding(name) else mark.shape
    return (*shape, *mark.values.shape)


def _noise(mark: Mark, other: Mark, table: Mapping[int, float] = _MOVED) -> float:
    """The largest error between two versions of one weight that quantisation explains."""
    total = 0.0
    for bits in (mark.bits, other.bits):
        least = min((known for known in table if known >= bits), default=16)
        if bits < min(table):
            raise InputError(
                f"weights of {bits} bits are too far from any others to be compared; calibrate that model"
            )
        total += table[least]
    return total


def _step(mark: Mark) -> float:
    """Half a step of a weight's codes, relative to the largest value that these hold."""
    return 0.0 if mark.bits == 16 else max(_FLOAT_STEP, 1 / (2**mark.bits - 1))


def _large_inputs(mark: Mark) -> Tensor:
    """Signs [PROBES, few] of the inputs of a matrix that make most of what its rows give."""
    inputs, rest = signs(mark.shape[1]), mark.values
    large = torch.zeros(PROBES, 0)
    while large.shape[1] < _MOST_LARGE:
        size = rest.norm(dim=1, keepdim=True)
        share = (rest / size.clamp(min=1e-19) @ inputs.t()).square().mean(0) / PROBES
        if share.max() <= _LARGE:
            break
        large = torch.cat([large, inputs[share.argmax()][:, None]], 1)
        rest = mark.values - _along(mark.values, large)
    return large


def _along(values: Tensor, directions: Tensor) -> Tensor:
    """The part of values [rows, PROBES] that `directions` [PROBES, few] make up."""
    inverse: Tensor = torch.linalg.pinv(directions)
    return values @ directions @ inverse


def _difference(one: Tensor, other: Tensor) -> float:
    """Relative to the larger of the two, 0 where both are zero."""
    largest = max(float(one.norm()), float(other.norm()))
    return float((one - other).norm()) / largest if largest else 0.0


def _factors(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """How many times each row of `one` is in that of `other`, and the rest, relative: [rows]."""
    square = one.square().sum(1)
    dead = square == 0
    factors = torch.where(dead, torch.ones(()), (one * other).sum(1) / square.clamp(min=1e-38))
    rest = (other - factors[:, None] * one).norm(dim=1)
    return factors, torch.where(dead, torch.zeros(()), rest / square.sqrt().clamp(min=1e-19))
