"""Which stored tensors change, and how: numbers themselves, or the scales of codes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.errors import UnsupportedModelError
from calib.export.base import checkpoint_prefix
from calib.measure.attention import CachedAttention
from calib.model.checkpoint import Checkpoint
from calib.model.dequantized import coded_weights
from calib.model.layouts.coded import CodedWeight
from calib.model.quantized import find_layout
from calib.model.stored import StoredTensor, stored_tensors
from calib.rescale.coded_factors import NotHeld, rescaled_parts, rounds_inputs
from calib.rescale.parameters import Factors, LayerFactors, Rescaled, rescaled_parameters
from calib.rescale.shards import Edit, exact_product

Coarser = Callable[[Tensor], Tensor]  # factors [K, D] of a layer -> those where few are held


@dataclass(frozen=True)
class Editing:
    """A checkpoint whose tensors are to be edited."""

    checkpoint: Checkpoint
    coded: Mapping[str, CodedWeight]
    stored: Mapping[str, StoredTensor]  # where weights are coded
    advice: str  # where a product is not exact
    exact: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint, advice: str, *, exact: bool) -> "Editing":
        """Read what a checkpoint holds."""
        layout = find_layout(checkpoint)
        coded = {weight.name: weight for weight in coded_weights(checkpoint, layout)}
        return cls(checkpoint, coded, stored_tensors(checkpoint) if coded else {}, advice, exact)

    def edits(self, changes: Iterable[Rescaled]) -> dict[str, Edit]:
        """The edit of each stored tensor; NotHeld where codes cannot follow."""
        found: dict[str, Edit] = {}
        for change in changes:
            name = f"{checkpoint_prefix(change.module, self.checkpoint)}.{change.inner}"
            if name in self.coded:
                parts = rescaled_parts(self.coded[name], self.stored, change.factor)
                found |= {part: _replaced_by(tensor) for part, tensor in parts.items()}
            elif name in self.checkpoint.entries:
                found[name] = exact_product(change, self.advice) if self.exact else change.product
            else:
                raise UnsupportedModelError(
                    f"'{self.checkpoint.path}' has no '{name}', which must be multiplied"
                )
        return found


def fitting(
    editing: Editing,
    model: PreTrainedModel,
    modules: Mapping[str, CachedAttention],
    factors: Factors,
    coarser: Coarser,
) -> tuple[Factors, dict[str, Edit]]:
    """The finest factors that the stored weights hold, layer by layer, and the edits they make.

    Where K's or V's are not held, `coarser` ones are tried; NotHeld where these are not either.
    """
    if not editing.coded:
        return factors, editing.edits(rescaled_parameters(model, modules, factors))
    ways = [lambda each: each, coarser]
    of_v = ways[1:] if rounds_inputs(editing.checkpoint) else ways
    found: dict[str, LayerFactors] = {}
    edits: dict[str, Edit] = {}
    for name, wanted in factors.items():
        problem = None
        for of_k, v in product(ways, of_v):
            tried = LayerFactors(of_k(wanted.k), v(wanted.v))
            changes = rescaled_parameters(model, {name: modules[name]}, {name: tried})
            try:
                edits |= editing.edits(changes)
                found[name] = tried
                break
            except NotHeld as error:
                problem = error
        else:
            raise problem or NotHeld(name)
    return found, edits


def one_per_layer(factors: Tensor) -> Tensor:
    """The smallest of all heads for each: with it none becomes larger than was wanted."""
    return factors.amin().expand_as(factors)


def none_at_all(factors: Tensor) -> Tensor:
    """Ones."""
    return torch.ones_like(factors)


def _replaced_by(tensor: Tensor) -> Edit:
    return lambda _: tensor
