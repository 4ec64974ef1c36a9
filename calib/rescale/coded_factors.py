"""Factors put into the scales of quantised weights; the codes stay as they are.

A scale holds a factor if all values that it is the scale of have the same one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from calib.errors import UnsupportedModelError
from calib.files.model_directory import ModelDirectory
from calib.files.tensors import StoredTensor
from calib.formats.compressed_tensors import find_quantization_config
from calib.models.quantized.coded_weight import CodedWeight

_LARGEST_E8M0 = 254
_WEIGHT_ONLY = {"auto-round", "awq", "gptq", "mxfp4"}
# of a module's input, by whether a value is its code times the scale, or divided by it
_OF_INPUT = {"input_scale": True, "input_global_scale": False}


class NotHeld(UnsupportedModelError):
    """The scales of a weight cannot hold a factor."""


def rounds_inputs(checkpoint: ModelDirectory) -> bool:
    """Whether engines quantise what goes into a quantised weight, as far as its config says."""
    says = find_quantization_config(checkpoint.config) or {}
    if says.get("quant_method") == "compressed-tensors":
        return any(group.get("input_activations") for group in says["config_groups"].values())
    return says.get("quant_method") not in _WEIGHT_ONLY


def rescaled_parts(
    weight: CodedWeight, stored: Mapping[str, StoredTensor], factor: Tensor
) -> dict[str, Tensor]:
    """The stored tensors that change when `weight` is multiplied by `factor`, by their names.

    `factor` is [rows, 1], or [1, columns] where the input is divided by it, or a product of both:
    powers of two. `stored` are all tensors of the checkpoint. NotHeld where one scale is of values
    with different factors, its type cannot hold the product, or engines would round it.
    """
    if "second_scale" in weight.parts:
        raise NotHeld(f"nobody has checked how engines fuse '{weight.name}', which has two scales")
    scale = stored[weight.parts["scale"]].read()
    if scale.dim() < 2 and scale.numel() == 1 and len(factor) > 1:
        raise NotHeld(
            f"'{weight.name}' has one scale, and engines requantise Q, K and V to the largest of theirs"
        )
    grid = scale.t() if weight.scheme.is_transposed else scale
    shape = grid.shape
    grid = grid.reshape(_two_sizes(grid))
    order = stored[weight.parts["g_idx"]].read() if "g_idx" in weight.parts else None
    order = None if order is None or (order == -1).any() else order  # -1: it was never set
    of_rows, of_columns = torch.ones(1), factor[0]
    if len(factor) > 1:
        of_rows, of_columns = factor[:, 0], factor[0] / factor[0, 0]
    high, wide = (size or whole for size, whole in zip(weight.scheme.block, weight.shape, strict=True))
    down = _of_blocks(of_rows, torch.arange(weight.shape[0]) // high, weight.name)
    groups = torch.arange(weight.shape[1]) // wide if order is None else order.long()
    across = _of_blocks(of_columns, groups, weight.name)
    product = _times(grid, down[:, None] * across, weight.name).reshape(shape)
    product = product.t() if weight.scheme.is_transposed else product
    found = {weight.parts["scale"]: product.contiguous()}
    return found | _of_input(weight.name.rpartition(".")[0], stored, factor)


def _of_input(module: str, stored: Mapping[str, StoredTensor], factor: Tensor) -> dict[str, Tensor]:
    """Scales of a module's input, which is divided by `factor`, if it is [1, columns]."""
    found = {}
    for name, multiplies in _OF_INPUT.items():
        scale = stored.get(f"{module}.{name}")
        if scale is not None and min(factor.shape) > 1:
            raise NotHeld(f"'{module}' has one scale of its input, and its rows differ in factors")
        if scale is not None and len(factor) == 1:
            one = factor.flatten()[:1]
            if not bool((factor == one).all()):
                raise NotHeld(f"one scale of what goes into '{module}', of different factors")
            found[f"{module}.{name}"] = _times(scale.read(), 1 / one if multiplies else one, module)
    return found


def _two_sizes(grid: Tensor) -> tuple[int, int]:
    sizes = [*grid.shape, 1, 1]
    # ModelOpt's of tiles are [down, 1, across, 1]
    return (sizes[0], sizes[2]) if grid.dim() == 4 else (sizes[0], sizes[1])


def _of_blocks(factor: Tensor, block: Tensor, name: str) -> Tensor:
    """The factor of each block: `block` [n] names that of each value of `factor`, [n] or [1]."""
    if len(factor) == 1:
        return factor
    found = torch.ones(int(block.max()) + 1)
    found[block] = factor
    if not torch.equal(found[block], factor):
        raise NotHeld(f"one scale of '{name}' is of values with different factors")
    return found


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
