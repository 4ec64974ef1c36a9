"""Weights of one code per value, or of two 4-bit floats per byte, times a scale per block.

Several tools store these, under names and with settings of their own.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor

from calib.models.quantized.coded_weight import (
    CODES,
    FLOATS,
    CodedWeight,
    ModuleTensors,
    Tensors,
    WeightFormatError,
    WeightScheme,
)
from calib.models.quantized.numbers import dequantise, powers_of_two, unpack_fp4

FP8, INT8, FP4 = "F8_E4M3", "I8", "U8"
E8M0 = ("U8", "F8_E8M0")

Block = tuple[int | None, int | None]  # its rows and columns; None: all


@dataclass(frozen=True)
class Grid:
    """The blocks of a matrix [rows, columns]; each has one scale."""

    rows: int
    columns: int
    block: Block

    @property
    def shape(self) -> tuple[int, int]:
        """How many blocks there are, down and across."""
        high, wide = self.block
        return -(-self.rows // (high or self.rows)), -(-self.columns // (wide or self.columns))

    @property
    def stored_shapes(self) -> list[tuple[int, ...]]:
        """Shapes that the scales may have in a file."""
        down, across = self.shape
        found: list[tuple[int, ...]] = [(down, across), *([(down,)] if across == 1 else [])]
        # the last is ModelOpt's of tiles
        return [*found, *([()] if down * across == 1 else []), (down, 1, across, 1)]

    def take(self, scales: Tensor, start: int, stop: int) -> Tensor:
        """The scales of the rows [start, stop), [stop - start or 1, across], of a stored shape.

        Where the last block of a row is narrower: of each column.
        """
        scales, (high, wide) = scales.reshape(self.shape), self.block
        scales = scales[torch.arange(start, stop) // (high or 1)] if self.shape[0] > 1 else scales
        if self.columns % (wide or self.columns):
            return scales.repeat_interleave(wide or 1, dim=1)[:, : self.columns]
        return scales


@dataclass(frozen=True)
class Scaled:
    """`code` [rows, columns] of a type, FP4 in pairs, times a `scale` per `block`.

    With a `weight_zero_point` like the scales, in the codes' type, a value is `(code - zero) *
    scale`; `has_zero_points` None: if it is there. `second` is a further scale of the whole weight,
    by which the others are multiplied, or divided if it `divides`.
    """

    block: Block = (None, None)
    code: str = "weight"
    dtype: str = FP8
    scales: tuple[str, ...] = ("weight_scale",)  # names, of which a module has one
    scale_dtypes: Collection[str] = FLOATS
    has_zero_points: bool | None = False
    second: str | None = None
    divides: bool = False

    def weight(self, module: ModuleTensors) -> CodedWeight:
        """The weight of `module`."""
        rows, columns = module.matrix(self.code, (self.dtype,))
        columns *= 2 if self.dtype == FP4 else 1
        if self.block[0] == 1:
            module.groups(columns, self.block[1])
        grid = Grid(rows, columns, self.block)
        scale = next((name for name in self.scales if name in module.entries), self.scales[-1])
        parts = {
            "codes": f"{module.name}.{self.code}",
            "scale": module.need(scale, self.scale_dtypes, *grid.stored_shapes),
        }
        zero = "weight_zero_point"
        if self.has_zero_points or (self.has_zero_points is None and zero in module.entries):
            parts["zeros"] = module.need(zero, (self.dtype,), *grid.stored_shapes)
        if self.second:
            parts["second_scale"] = module.need(self.second, FLOATS, (), (1,), (1, 1))
        rows_of = partial(self._rows, grid=grid)
        name = f"{module.name}.weight"
        return CodedWeight(name, (rows, columns), parts, rows_of, block=self.block)

    def _rows(self, tensors: Tensors, start: int, stop: int, *, grid: Grid) -> Tensor:
        codes, scales = tensors["codes"][start:stop], powers_of_two(tensors["scale"])
        codes = unpack_fp4(codes) if self.dtype == FP4 else codes.float()
        if "second_scale" in tensors:
            second = tensors["second_scale"].float().reshape(())
            scales = scales / second if self.divides else scales * second
        scales = grid.take(scales, start, stop)
        if self.dtype in (FP8, FP4) and (scales < 0).any():  # AutoRound's integers have such
            raise WeightFormatError("a scale of its floats is negative")
        zeros = tensors.get("zeros")
        zeros = None if zeros is None else grid.take(zeros.float(), start, stop)
        return dequantise(codes, scales, zeros)


MXFP8 = Scaled((1, 32), scale_dtypes=E8M0)
MXFP4 = Scaled((1, 32), dtype=FP4, scale_dtypes=E8M0)
NVFP4 = Scaled((1, 16), dtype=FP4, scale_dtypes=(FP8,), second="weight_scale_2")


@dataclass(frozen=True)
class ByName:
    """Modules whose `weight` is codes, each in the scheme of the first pattern of its name."""

    label: str
    scheme: WeightScheme | None  # of all others
    by_pattern: tuple[tuple[str, WeightScheme], ...] = ()

    def weights(self, module: ModuleTensors) -> Iterable[CodedWeight]:
        """The weight of a module that holds codes."""
        entry = module.entries.get("weight")
        if entry is None or entry.dtype not in CODES:
            return
        named = (scheme for glob, scheme in self.by_pattern if fnmatchcase(module.name, glob))
        scheme = next(named, self.scheme)
        if scheme is None:
            raise WeightFormatError(f"'{module.name}' holds codes, and its config does not name it")
        yield scheme.weight(module)
