"""Weights of one code per value, or of two 4-bit floats per byte, times a scale per block.

Several tools store these, under names and with settings of their own.
"""

from collections.abc import Collection
from functools import partial

from torch import Tensor

from calib.model.layouts.coded import FLOATS, CodedWeight, Module, Tensors, groups_in
from calib.model.layouts.grid import Grid
from calib.model.layouts.unpacking import powers_of_two, unpack_fp4

FP8 = ("F8_E4M3",)
INT8 = ("I8",)
E8M0 = ("U8", "F8_E8M0")
# columns of a block of each kind of 4-bit floats
NVFP4_GROUP = 16
MXFP4_GROUP = 32


def scaled_weight(
    module: Module,
    block: tuple[int | None, int | None],
    *,
    codes: Collection[str] = FP8,
    scale: str = "weight_scale",
    scale_dtypes: Collection[str] = FLOATS,
    zero_point: str | None = None,
    also: tuple[str, ...] = (),
) -> CodedWeight:
    """`weight` [rows, columns] of the types `codes`, with a `scale` per `block` of it.

    A size of None is the whole of it. With `zero_point`, the name of a tensor like `scale` in the
    type of the codes, a value is `(code - zero point) * scale`.
    """
    rows, columns = module.matrix("weight", codes)
    grid = Grid(rows, columns, (block[0] or rows, block[1] or columns))
    parts = {
        "codes": f"{module.name}.weight",
        "scale": module.need(scale, scale_dtypes, *grid.stored_shapes),
    }
    if zero_point:
        parts["zero_point"] = module.need(zero_point, codes, *grid.stored_shapes)
    return CodedWeight(
        f"{module.name}.weight", (rows, columns), parts, partial(_rows, grid=grid),
        _finite(scale_dtypes), also=present(module, also),
    )  # fmt: skip


def grouped_weight(module: Module, group_size: int, **options: Collection[str]) -> CodedWeight:
    """A `scaled_weight` with a scale per group of a row; groups must divide the columns."""
    columns = module.matrix("weight", options.get("codes", FP8))[1]
    groups_in(module, columns, group_size)
    return scaled_weight(module, (1, group_size), **options)  # type: ignore[arg-type]


def fp4_weight(
    module: Module,
    group_size: int,
    *,
    codes: str,
    scale_dtypes: Collection[str],
    second: str | None = None,
    divides: bool = False,
    also: tuple[str, ...] = (),
) -> CodedWeight:
    """FP4 pairs in `codes` [rows, columns / 2], `weight_scale` [rows, columns / group_size].

    `second` is the name of one more scale, of the whole weight, by which the others are multiplied,
    or divided where it `divides`.
    """
    rows, packed = module.matrix(codes, ("U8",))
    grid = Grid(rows, 2 * packed, (1, group_size))
    groups_in(module, 2 * packed, group_size)
    parts = {
        "codes": f"{module.name}.{codes}",
        "scale": module.need("weight_scale", scale_dtypes, grid.shape),
    }
    if second:
        parts["second"] = module.need(second, FLOATS, (), (1,), (1, 1))
    finite = (*_finite(scale_dtypes), *(["second"] if second else []))
    return CodedWeight(
        f"{module.name}.weight", (rows, 2 * packed), parts,
        partial(_fp4_rows, grid=grid, divides=divides), finite, also=present(module, also),
    )  # fmt: skip


def present(module: Module, parts: tuple[str, ...]) -> tuple[str, ...]:
    """The full names of those of `parts` that `module` has."""
    return tuple(f"{module.name}.{part}" for part in parts if part in module.entries)


def _finite(scale_dtypes: Collection[str]) -> tuple[str, ...]:
    # any byte is a whole number: one that stands for NaN shows in the weight
    return () if "U8" in scale_dtypes else ("scale",)


def _rows(tensors: Tensors, start: int, stop: int, *, grid: Grid) -> Tensor:
    codes = tensors["codes"][start:stop].float()
    if "zero_point" in tensors:
        codes = codes - grid.spread(tensors["zero_point"].float(), start, stop)
    return codes * grid.spread(powers_of_two(tensors["scale"]), start, stop)


def _fp4_rows(tensors: Tensors, start: int, stop: int, *, grid: Grid, divides: bool) -> Tensor:
    scales = powers_of_two(tensors["scale"])
    if "second" in tensors:
        second = tensors["second"].float().reshape(())
        scales = scales / second if divides else scales * second
    return unpack_fp4(tensors["codes"][start:stop]) * grid.spread(scales, start, stop)
