"""Marks of two checkpoints compared: their K and V are the same, or it is said why not.

What quantisation changes in a weight is noise: it leaves a row's size as it was. A tool that moves
factors between weights changes the size of rows, and with them the range of K or V.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from calib.same_model.marks import (
    PROBES,
    Mark,
    Marks,
    fixed_inputs,
    is_cached,
    is_embedding,
    is_output,
    norm_before,
)

_VECTOR_NOISE = 0.01  # of vectors and embeddings: rounding to bfloat16 differs by 0.4 %
# relative error of a weight in so many bits at most, and a margin. A value of normally distributed
# weights has 2.6 % (FP8), 1 % (INT8), 11 % (4 bits in groups of 128), 25 % (3 bits)
_NOISE = {16: 0.005, 8: 0.06, 6: 0.2, 5: 0.25, 4: 0.35, 3: 0.5}
_NOISE_AFTER_MOVING = {**_NOISE, 8: 0.15}  # where factors were moved into it before it was quantised
# the size of a row, and of the median row, may differ by this share and its noise: too little to
# matter in a scale
_ROW, _MEDIAN = 0.03, 0.02
# beside those for K and V; AWQ moves factors from the rows of `up_proj` into `down_proj`
_SIZED = re.compile(r".*\b(?:q_proj|gate_proj|w1)\.weight")
_ROW_DEVIATIONS, _MEDIAN_DEVIATIONS = 4, 2  # standard deviations of what probes see of that noise
# An input that makes more than this part of what rows give is compared apart: a trained norm may
# enlarge one channel a hundred times, and the rounding of one weight then looks like a factor.
# Below it the noise of a row is that of at least eight weights, which `_ROW_DEVIATIONS` allow for.
_LARGE = 1 / 8
_MOST_LARGE = 8  # of them, of 64 probes
_RECORDED = 2**-8  # two marks are each rounded to bfloat16, relative to the whole of a row
_FLOAT_STEP = 2**-4  # half a step of E4M3, which a row takes over where one value is nearly all of it


class OtherWeightsError(ValueError):
    """K and V of two checkpoints are not the same; the message says by which weight."""


@dataclass(frozen=True)
class Likeness:
    """The distance between two checkpoints of one model."""

    layers_with_moved_factors: int  # from norms into weights
    largest_error: float  # of a weight for K and V, relative
    largest_factor: float  # that the size of a row of these differs by, less 1
    scaled: dict[str, float] = field(default_factory=dict)  # factors of further weights, as `up_proj`


def compare_marks(base: Marks, target: Marks) -> Likeness:
    """Compare marks of the model that was measured with those of another checkpoint.

    OtherWeightsError unless K and V are the same.
    """
    _check_shapes(base.tensors, target.tensors)
    pairs = {
        name: (base.tensors[name], target.tensors[name]) for name in base.tensors if name in target.tensors
    }
    moved = _moved_norms(base.tensors, pairs)
    matrices = [n for n, mark in base.tensors.items() if len(mark.shape) == 2 and not is_embedding(n)]
    errors, factors, scaled = [0.0], [0.0], dict[str, float]()
    # all must be the same, and those behind norms that differ make up for them
    for name in sorted(matrices, key=is_cached, reverse=True):
        is_behind = norm_before(name, base.tensors) in moved
        reason = "norms differ, and " if is_behind else ""
        if name in pairs:
            error, factor, scaled_by = _compare_matrix(name, *pairs[name], reason)
            scaled |= {name: scaled_by} if scaled_by is not None else {}
            if is_cached(name):
                errors.append(error)
                factors.append(factor)
        elif is_behind:
            raise OtherWeightsError(f"{reason}'{name}', which reads one, cannot be compared")
    return Likeness(len({".".join(norm.split(".")[:2]) for norm in moved}), max(errors), max(factors), scaled)


def _check_shapes(base: Mapping[str, Mark], target: Mapping[str, Mark]) -> None:
    """Refuse tensors that only one side has, or that have another shape there."""
    for marks, partner, side in ((base, target, "model that was measured"), (target, base, "second")):
        for name, mark in marks.items():
            is_needed = len(mark.shape) == 1 or is_cached(name) or is_embedding(name)
            # a bias of zeros is none
            if name not in partner and is_needed and mark.values.any():
                raise OtherWeightsError(f"'{name}' is only in the {side}")
    for name in base.keys() & target.keys():
        one, two = base[name], target[name]
        skipped = 1 if is_embedding(name) else 0  # it may have grown by tokens
        if one.shape[skipped:] != two.shape[skipped:] or one.values.shape != two.values.shape:
            raise OtherWeightsError(f"'{name}' is {[*one.shape]} there and {[*two.shape]} here")


def _moved_norms(base: Mapping[str, Mark], pairs: Mapping[str, tuple[Mark, Mark]]) -> set[str]:
    """Return norms whose factors differ; refuse other vectors and embeddings that do."""
    norms = {norm_before(name, base) for name, mark in base.items() if len(mark.shape) == 2}
    moved = set()
    for name, (one, two) in pairs.items():
        if len(one.shape) > 1 and not is_embedding(name):
            continue
        allowed = _VECTOR_NOISE if one.bits == two.bits == 16 else _noise(one, two, _NOISE_AFTER_MOVING)
        if _distance(one.values, two.values) > allowed:
            norm = name.rpartition(".")[0]
            if norm not in norms:
                raise OtherWeightsError(f"'{name}' differs, which quantisation leaves alone")
            moved.add(norm)
    return moved


def _compare_matrix(name: str, mark: Mark, target: Mark, reason: str) -> tuple[float, float, float | None]:
    """Return a weight's error and largest factor, and one that is let pass; refuse another weight."""
    large = _large_inputs(mark)
    along, target_along = _along(mark.values, large), _along(target.values, large)
    remainder = mark.values - along
    factors, errors = _row_factors(remainder, target.values - target_along)
    size = remainder.norm(dim=1, keepdim=True).clamp(min=1e-19)
    beyond = errors / factors.abs().clamp(min=1)  # rounding grows with a row
    if large.shape[1]:  # what rounding of marks leaves of the rest is not an error
        whole = mark.values.norm(dim=1) / size[:, 0]
        beyond = (beyond - _RECORDED * whole).clamp(min=0)
    error = float(beyond.square().mean().sqrt())
    if mark.bits == target.bits == 16 or is_cached(name):  # of others two weights are too few
        before, after = along / size, target_along / size
        # as it was, or larger like the rest of its row, which is known less well
        ways = (torch.ones_like(factors), factors)
        error = max(error, min(_distance(before * way[:, None], after) for way in ways))
    if error > _noise(mark, target, _NOISE_AFTER_MOVING if reason else _NOISE):
        raise OtherWeightsError(f"{reason}'{name}' is {error:.0%} from what it was, more than rounding")
    scaled_by = _row_size(factors, errors, _step(mark) + _step(target))
    if scaled_by is not None and (is_cached(name) or is_output(name) or _SIZED.fullmatch(name)):
        problem = f"{reason}a row of '{name}' is {show_factor(scaled_by)} times what it was"
        if name.endswith("v_proj.weight"):
            problem += ", as where AWQ moves factors between V and the output projection"
        raise OtherWeightsError(problem)
    return error, float((factors - 1).abs().max()), scaled_by


def show_factor(factor: float) -> str:
    """Format a factor between rows with three digits: 0.0012, 1.1, 1,000."""
    return f"{float(f'{factor:.3g}'):,g}"


def _row_size(factors: Tensor, errors: Tensor, step: float) -> float | None:
    """Return the factor of a matrix whose rows have become larger or smaller by more than their noise."""
    change, noise = (factors - 1).abs(), errors / PROBES**0.5
    beyond = change - (_ROW + step + _ROW_DEVIATIONS * noise)
    # codes that fit best are smaller than what they stand for, by the square of their error
    usual = _MEDIAN + _MEDIAN_DEVIATIONS * noise.median() + errors.median().square()
    is_larger = bool((beyond > 0).any() or change.median() > usual)
    return float(factors[beyond.argmax()]) if is_larger else None


def _noise(mark: Mark, target: Mark, table: Mapping[int, float]) -> float:
    """Return the largest error between two versions of one weight that quantisation explains."""
    total = 0.0
    for bits in (mark.bits, target.bits):
        if bits < min(table):
            raise OtherWeightsError(f"weights of {bits} bits are too far from any others to be compared")
        total += table[min((size for size in table if size >= bits), default=16)]
    return total


def _step(mark: Mark) -> float:
    """Return half a step of a weight's codes, relative to the largest value that these hold."""
    return 0.0 if mark.bits == 16 else max(_FLOAT_STEP, 1 / (2**mark.bits - 1))


def _large_inputs(mark: Mark) -> Tensor:
    """Return signs [PROBES, few] of the inputs of a matrix that make most of what its rows give."""
    inputs, remainder = fixed_inputs(mark.shape[1]), mark.values
    large = torch.zeros(PROBES, 0)
    while large.shape[1] < _MOST_LARGE:
        size = remainder.norm(dim=1, keepdim=True)
        share = (remainder / size.clamp(min=1e-19) @ inputs.t()).square().mean(0) / PROBES
        if share.max() <= _LARGE:
            break
        large = torch.cat([large, inputs[share.argmax()][:, None]], 1)
        remainder = mark.values - _along(mark.values, large)
    return large


def _along(values: Tensor, directions: Tensor) -> Tensor:
    """Project values [rows, PROBES] onto `directions` [PROBES, few]."""
    inverse: Tensor = torch.linalg.pinv(directions)
    return values @ directions @ inverse


def _distance(one: Tensor, target: Tensor) -> float:
    """Return the distance relative to the larger of the two, 0 where both are zero."""
    largest = max(float(one.norm()), float(target.norm()))
    return float((one - target).norm()) / largest if largest else 0.0


def _row_factors(one: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many times each row of `one` is in `target`, and the remainder, relative: [rows] both."""
    square = one.square().sum(1)
    is_zero = square == 0
    factors = torch.where(is_zero, torch.ones(()), (one * target).sum(1) / square.clamp(min=1e-38))
    remainder = (target - factors[:, None] * one).norm(dim=1)
    return factors, torch.where(is_zero, torch.zeros(()), remainder / square.sqrt().clamp(min=1e-19))
