"""Stored weights that take factors, in plain numbers or in the scales of codes, and their files.

Codes never change. A scale can take a factor only if all values under this scale have the same factor.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from calib.errors import InputError, UnsupportedModelError
from calib.files.atomic import place_shard, read_shard, save_tensors
from calib.files.config import find_quantization_config
from calib.files.model_directory import ModelDirectory
from calib.files.names import CONFIG_FILE, INDEX_FILE
from calib.files.tensors import StoredTensor, stored_tensors
from calib.formats.directory import copy_small_files, write_index, write_json
from calib.models.quantized.coded_weight import CodedWeight
from calib.models.quantized.weights import split_weights
from calib.progress import Progress
from calib.rescale.weight_changes import (
    AttentionWeights,
    Factors,
    Norms,
    WeightChange,
    cached_attention,
    is_held,
    list_changes,
)

_LARGEST_E8M0 = 254
_WEIGHT_ONLY = {"auto-round", "awq", "gptq", "mxfp4"}
# scales of a module's input -> True: a value is its code times the scale; False: divided by it
_INPUT_SCALES = {"input_scale": True, "input_global_scale": False}

# a tensor in place of a stored one, of any shape, or a function of it
Edit = Tensor | Callable[[Tensor], Tensor]


class NotHeld(UnsupportedModelError):
    """A weight or its scales cannot hold a factor."""


class StoredModel:
    """A model, its attention modules, and its weights as they are stored.

    Floats are cast to `dtype`, if given, before they are edited; errors about inexact products end with
    `advice`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: ModelDirectory,
        dtype: torch.dtype | None = None,
        advice: str = "",
    ) -> None:
        self.model, self.modules, self.checkpoint = model, cached_attention(model), checkpoint
        self.dtype, self.advice, self.stored = dtype, advice, stored_tensors(checkpoint)
        coded = split_weights(checkpoint).coded
        self.coded = {weight.name: weight for weight in coded}

    @property
    def rounds_inputs(self) -> bool:
        """Return whether engines quantise the inputs of quantised weights, as far as the config says."""
        quantization = find_quantization_config(self.checkpoint.config) or {}
        if self.coded and quantization.get("quant_method") == "compressed-tensors":
            return any(group.get("input_activations") for group in quantization["config_groups"].values())
        return bool(self.coded) and quantization.get("quant_method") not in _WEIGHT_ONLY

    def attention(self, name: str) -> AttentionWeights:
        """Return the weights of the attention module `name`."""
        return AttentionWeights(self.modules[name], self.model.get_submodule(name))

    def list_changes(self, factors: Factors) -> list[WeightChange]:
        """List the parameters to multiply, so that K and V of some modules get `factors`."""
        return list_changes(self.model, self.modules, factors)

    def edits(self, changes: Iterable[WeightChange]) -> dict[str, Edit]:
        """Return the edit of each stored tensor; NotHeld where one cannot hold its factor."""
        edits: dict[str, Edit] = {}
        changes = list(changes)
        norms = self.one_plus_norms(changes)
        if not bool(is_held(norms).all()):
            change, weight = next(norm for norm in norms if not norm[0].is_exact(norm[1]))
            raise NotHeld(_explain_rounding(change, weight, self.advice))
        for change in changes:
            name = self._stored_name(change)
            if name in self.coded:
                edits |= edited_scales(self.coded[name], self.stored, change.factor)
            elif change.adds_one:
                edits[name] = change.product
            # biases beside codes may be narrow
            elif self.coded and not change.is_exact(weight := self._read(name)):
                raise NotHeld(_explain_rounding(change, weight, self.advice))
            else:
                edits[name] = partial(_multiply, change, self.advice)
        return edits

    def one_plus_norms(self, changes: Iterable[WeightChange]) -> Norms:
        """Return the changes of 1 + a weight, and the weights as they would be stored."""
        return [(change, self._read(self._stored_name(change))) for change in changes if change.adds_one]

    def _read(self, name: str) -> Tensor:
        weight = self.stored[name].read()
        return weight if self.dtype is None else weight.to(self.dtype)

    def _stored_name(self, change: WeightChange) -> str:
        """Return the name of a parameter in the checkpoint; transformers renames some of them on load."""
        names = self.coded.keys() | self.checkpoint.entries.keys()
        weight = self.model.get_parameter(change.name)
        renamed = revert_weight_conversion(self.model, {change.name: weight})
        if len(renamed) == 1 and names.issuperset(renamed):
            stored = str(*renamed)
            if stored in self.coded or torch.Size(self.stored[stored].shape).numel() == weight.numel():
                return stored
            raise UnsupportedModelError(f"'{stored}' holds several layers, of which '{change.name}' is one")
        name = f"{self.checkpoint.attention_prefix(change.module)}.{change.child}"
        if name not in names:
            raise UnsupportedModelError(f"'{self.checkpoint.path}' has no '{name}', which must be multiplied")
        return name


def _multiply(change: WeightChange, advice: str, weight: Tensor) -> Tensor:
    if not change.is_exact(weight):
        raise InputError(_explain_rounding(change, weight, advice))
    return change.product(weight)


def _explain_rounding(change: WeightChange, weight: Tensor, advice: str) -> str:
    dtype = str(weight.dtype).removeprefix("torch.")
    wider = "" if weight.dtype == torch.float32 else "add --dtype float32"
    ways = " or ".join(filter(None, (wider, advice))) or "nothing wider is known"
    low, high = change.factor.aminmax()
    factor = f"{low.item():g}" if low == high else "its factors"
    if change.adds_one:
        return f"1 + '{change.name}' times {factor} has no exact value in {dtype}; {ways}"
    return f"'{change.name}' times {factor} is not exact in {dtype}; {ways}"


def edited_scales(
    weight: CodedWeight, stored: Mapping[str, StoredTensor], factor: Tensor
) -> dict[str, Tensor]:
    """Return the stored scales that change when `weight` is multiplied by `factor`, by their names.

    `factor` is [rows, 1], or [1, columns] where the input is divided by it, or a product of both: powers of
    two. `stored` are all tensors of the checkpoint. NotHeld is raised if values that share a scale have
    different factors, if its type cannot hold the product, or if engines would round it.
    """
    if "second_scale" in weight.parts:
        raise NotHeld(f"nobody has checked how engines fuse '{weight.name}', which has two scales")
    scale = stored[weight.parts["scale"]].read()
    if scale.dim() < 2 and scale.numel() == 1 and len(factor) > 1:
        raise NotHeld(
            f"'{weight.name}' has one scale, and engines requantise Q, K and V to the largest of their scales"
        )
    grid = scale.t() if weight.scheme.is_transposed else scale
    shape = grid.shape
    # ModelOpt's scales of tiles are [down, 1, across, 1]
    sizes = shape[::2] if grid.dim() == 4 else (*shape, 1, 1)[:2]
    order = stored[weight.parts["g_idx"]].read() if "g_idx" in weight.parts else None
    order = None if order is None or (order == -1).any() else order  # -1: it was never set
    row_factors, column_factors = torch.ones(1), factor[0]
    if len(factor) > 1:
        row_factors, column_factors = factor[:, 0], factor[0] / factor[0, 0]
    block_rows, block_columns = (
        size or whole for size, whole in zip(weight.scheme.block, weight.shape, strict=True)
    )
    groups = torch.arange(weight.shape[1]) // block_columns if order is None else order.long()
    down = _block_factors(row_factors, torch.arange(weight.shape[0]) // block_rows, weight.name)
    across = _block_factors(column_factors, groups, weight.name)
    product = _times(grid.reshape(sizes), down[:, None] * across, weight.name).reshape(shape)
    product = product.t() if weight.scheme.is_transposed else product
    scales = {weight.parts["scale"]: product.contiguous()}
    return scales | _edited_input_scales(weight.name.rpartition(".")[0], stored, factor)


def _edited_input_scales(
    module: str, stored: Mapping[str, StoredTensor], factor: Tensor
) -> dict[str, Tensor]:
    """Return the changed scales of a module's input; `factor` [1, columns] divides it, [rows, 1] does not."""
    scales = {}
    for part, multiplies in _INPUT_SCALES.items():
        scale = stored.get(f"{module}.{part}")
        if scale is not None and min(factor.shape) > 1:
            raise NotHeld(f"'{module}' has one input scale, and both its rows and its columns need factors")
        if scale is not None and len(factor) == 1:
            first = factor.flatten()[:1]
            if not bool((factor == first).all()):
                raise NotHeld(f"'{module}' has one input scale, and its columns need different factors")
            scales[f"{module}.{part}"] = _times(scale.read(), 1 / first if multiplies else first, module)
    return scales


def _block_factors(factor: Tensor, block: Tensor, name: str) -> Tensor:
    """Return the factor of each block, from `factor` [n] or [1]; `block` [n] is the index of its block."""
    if len(factor) == 1:
        return factor
    factors = torch.ones(int(block.max()) + 1)
    factors[block] = factor
    if not torch.equal(factors[block], factor):
        raise NotHeld(f"values of '{name}' that share a scale need different factors")
    return factors


def _times(scale: Tensor, factor: Tensor, name: str) -> Tensor:
    lost = NotHeld(f"the scales of '{name}' cannot hold their product with the factors")
    if not scale.is_floating_point() or scale.dtype == torch.float8_e8m0fnu:
        exponents = scale.view(torch.uint8).int() + factor.log2().int()
        if exponents.min() < 0 or exponents.max() > _LARGEST_E8M0:
            raise lost
        return exponents.to(torch.uint8).view(scale.dtype)
    product = (scale.float() * factor).to(scale.dtype)
    if not (product.isfinite().all() and torch.equal(product.float() / factor, scale.float())):
        raise lost
    return product


def write_weights(
    checkpoint: ModelDirectory,
    edits: Mapping[str, Edit],
    out: Path,
    dtype: torch.dtype | None,
    progress: Progress,
) -> None:
    """Fill `out` with the checkpoint and its `edits`; weight files without edits are linked.

    With a `dtype`, all floats are cast to it before they are edited.
    """
    copy_small_files(checkpoint, out)
    weight_map, growth = checkpoint.weight_map, 0
    progress.stage("write", sum(size for _, size, _ in checkpoint.states.values()), "bytes")
    for shard, (_, size, _) in checkpoint.states.items():
        names = {name for name, file in weight_map.items() if file == shard}
        if dtype is None and names.isdisjoint(edits):
            place_shard(checkpoint.path / shard, out / shard, set(), "link", lambda *_: None)
        else:
            growth += _rewrite(checkpoint.path / shard, out / shard, edits, dtype)
        progress.advance(size)
    if dtype is not None:
        write_json(out / CONFIG_FILE, _set_dtype(checkpoint.config, str(dtype).removeprefix("torch.")))
    if (checkpoint.path / INDEX_FILE).exists():
        if growth:
            write_index(checkpoint, out, weight_map, growth)
        else:
            shutil.copyfile(checkpoint.path / INDEX_FILE, out / INDEX_FILE)


def _rewrite(source: Path, target: Path, edits: Mapping[str, Edit], dtype: torch.dtype | None) -> int:
    """Write `target`; return by how many bytes its tensors grew."""
    tensors, metadata = read_shard(source)
    size = sum(int(tensor.nbytes) for tensor in tensors.values())
    for name, tensor in tensors.items():
        cast = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        edit = edits.get(name, cast)
        tensors[name] = edit if isinstance(edit, Tensor) else edit(cast)
    save_tensors(tensors, target, metadata)
    return sum(int(tensor.nbytes) for tensor in tensors.values()) - size


def _set_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return `config` with the dtype of the weights, under the names that it uses."""
    nested = {key: _set_dtype(value, dtype) for key, value in config.items() if isinstance(value, dict)}
    return {**config, **nested, **dict.fromkeys(config.keys() & {"dtype", "torch_dtype"}, dtype)}
