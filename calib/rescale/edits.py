"""Which stored tensors change, and how: numbers themselves, or the scales of codes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from calib.capture.attention import CachedAttention
from calib.errors import InputError, UnsupportedModelError
from calib.files.model_directory import ModelDirectory
from calib.files.tensors import StoredTensor, stored_tensors
from calib.models.quantized.coded_weight import CodedWeight
from calib.models.quantized.detect import find_weight_format
from calib.models.quantized.weights import coded_weights
from calib.rescale.coded_factors import NotHeld, rescaled_parts, rounds_inputs
from calib.rescale.one_plus import Norms, is_held
from calib.rescale.parameters import rescaled_parameters
from calib.rescale.products import Factors, LayerFactors, Rescaled
from calib.rescale.shards import Edit, exact_product

# factors [K, D] of a layer -> others, that more weights hold
Coarser = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Editing:
    """A checkpoint whose tensors are to be edited."""

    checkpoint: ModelDirectory
    coded: Mapping[str, CodedWeight]
    stored: Mapping[str, StoredTensor]
    dtype: torch.dtype | None  # that floats get before they are edited; None: their own
    advice: str  # where a product is not exact
    exact: bool

    @classmethod
    def of(
        cls, checkpoint: ModelDirectory, dtype: torch.dtype | None, advice: str, *, exact: bool
    ) -> "Editing":
        """Read what a checkpoint holds."""
        coded = coded_weights(checkpoint, find_weight_format(checkpoint))
        by_name = {weight.name: weight for weight in coded}
        return cls(checkpoint, by_name, stored_tensors(checkpoint), dtype, advice, exact)

    def edits(self, model: PreTrainedModel, changes: Iterable[Rescaled]) -> dict[str, Edit]:
        """The edit of each stored tensor; NotHeld where one cannot hold it."""
        found: dict[str, Edit] = {}
        changes = list(changes)
        if self.exact:
            self._check_norms(self.norms_adding_one(model, changes))
        for change in changes:
            name = self._stored_name(model, change)
            if name in self.coded:
                parts = rescaled_parts(self.coded[name], self.stored, change.factor)
                found |= {part: _replaced_by(tensor) for part, tensor in parts.items()}
            else:
                found[name] = self._product(name, change)
        return found

    def norms_adding_one(self, model: PreTrainedModel, changes: Iterable[Rescaled]) -> Norms:
        """Those of `changes` that are of 1 + a weight, and the weights as they would be stored."""
        return [(each, self._weight(self._stored_name(model, each))) for each in changes if each.adds_one]

    def _weight(self, name: str) -> Tensor:
        weight = self.stored[name].read()
        return weight if self.dtype is None else weight.to(self.dtype)

    def _check_norms(self, norms: Norms) -> None:
        """NotHeld unless rounding norms' weights is no more than `one_plus.py` allows."""
        if bool(is_held(norms).all()):
            return
        change, weight = next(each for each in norms if not each[0].is_exact(each[1]))
        dtype = str(weight.dtype).removeprefix("torch.")
        wider = "" if weight.dtype == torch.float32 else "add --dtype float32"
        ways = " or ".join(filter(None, (wider, self.advice))) or "nothing wider is known"
        low, high = change.factor.aminmax()
        times = f"{low.item():g}" if low == high else "its factors"
        raise NotHeld(f"1 + '{change.name}' times {times} is not held by {dtype}; {ways}")

    def _stored_name(self, model: PreTrainedModel, change: Rescaled) -> str:
        """What the checkpoint calls a parameter; transformers renames some of them on load."""
        held = self.coded.keys() | self.checkpoint.entries.keys()
        parameter = {change.name: model.get_parameter(change.name)}
        renamed = revert_weight_conversion(model, parameter)
        if len(renamed) == 1 and held.issuperset(renamed):
            return str(*renamed)
        name = f"{self.checkpoint.attention_prefix(change.module)}.{change.inner}"
        if name not in held:
            raise UnsupportedModelError(f"'{self.checkpoint.path}' has no '{name}', which must be multiplied")
        return name

    def _product(self, name: str, change: Rescaled) -> Edit:
        if change.adds_one or not self.exact:
            return change.product
        edit = exact_product(change, self.advice)
        if self.coded:  # biases beside codes may be narrow
            try:
                edit(self._weight(name))
            except InputError as error:
                raise NotHeld(str(error)) from None
        return edit


def fitting(
    editing: Editing,
    model: PreTrainedModel,
    modules: Mapping[str, CachedAttention],
    factors: Factors,
    coarser: Sequence[Coarser],
) -> tuple[Factors, dict[str, Edit], dict[str, str]]:
    """The finest factors that the stored weights hold, layer by layer, and the edits they make.

    Where K's or V's are not held, `coarser` ones are tried in turn. Layers that hold none stay as
    they are where `none_at_all` is one of these: the third result says why. Else NotHeld.
    """
    of_k = of_v = [_as_wanted, *coarser]
    if editing.coded and rounds_inputs(editing.checkpoint):
        of_v = [*coarser]
    # the nearest to what was wanted first
    ways = sorted(product(enumerate(of_k), enumerate(of_v)), key=lambda pair: pair[0][0] + pair[1][0])
    found: dict[str, LayerFactors] = {}
    edits: dict[str, Edit] = {}
    left: dict[str, str] = {}
    for name, wanted in factors.items():
        problem = None
        for (_, k), (_, v) in ways:
            tried = LayerFactors(k(wanted.k), v(wanted.v))
            changes = rescaled_parameters(model, {name: modules[name]}, {name: tried})
            if problem and not changes:
                continue
            try:
                edits |= editing.edits(model, changes)
                found[name] = tried
                break
            except NotHeld as error:
                problem = problem or error
        else:
            problem = problem or NotHeld(name)
            left[name] = str(problem)
            if none_at_all not in coarser or len(left) == len(factors):
                raise problem
            found[name] = LayerFactors(none_at_all(wanted.k), none_at_all(wanted.v))
    rescaled_parameters(model, modules, found)  # refuses a tensor of two layers
    return found, edits, left


def _as_wanted(factors: Tensor) -> Tensor:
    return factors


def one_per_layer(factors: Tensor) -> Tensor:
    """The smallest of all heads for each: with it none becomes larger than was wanted."""
    return factors.amin().expand_as(factors)


def smaller(octaves: int) -> Coarser:
    """One per layer, nearer to 1 by so many octaves, for scales that hold no larger ones.

    Those below 1 stay: without them values would saturate.
    """

    def shrink(factors: Tensor) -> Tensor:
        one = one_per_layer(factors)
        return torch.where(one > 1, (one / 2**octaves).clamp(min=1), one)

    return shrink


def none_at_all(factors: Tensor) -> Tensor:
    """Ones."""
    return torch.ones_like(factors)


# for FP8, where a factor too small still is better than none, and for integers
FOR_FP8: tuple[Coarser, ...] = (one_per_layer, *map(smaller, range(1, 16)))
FOR_INT8: tuple[Coarser, ...] = (none_at_all,)


def _replaced_by(tensor: Tensor) -> Edit:
    return lambda _: tensor
