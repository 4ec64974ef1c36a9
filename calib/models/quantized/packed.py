"""compressed-tensors' `pack-quantized`: codes in int32 words along the rows.

Source: `compressors/pack_quantized` of compressed-tensors 0.17, which leaves the bits of a word
over that hold no whole code, and of 0.20, which goes on in the next word; a file's shapes tell.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from calib.models.quantized.coded_weight import (
    ADVICE,
    FLOATS,
    CodedWeight,
    ModuleTensors,
    Tensors,
    WeightFormatError,
)
from calib.models.quantized.numbers import dequantise, order_of, unpack, words_for
from calib.models.quantized.scaled import Block, Grid


@dataclass(frozen=True)
class Packed:
    """`weight_packed` [rows, words], `weight_scale` per `block`.

    `weight_zero_point` is packed down the columns; `weight_g_idx` [columns] is each column's group.
    """

    bits: int
    block: Block
    has_zero_points: bool
    ordered: bool

    def weight(self, module: ModuleTensors) -> CodedWeight:
        """The weight of `module`."""
        rows, words = module.matrix("weight_packed", ("I32",))
        columns = self._columns(module, words)
        across = words == words_for(columns, self.bits)
        grid = Grid(rows, columns, self.block)
        parts = {
            "codes": f"{module.name}.weight_packed",
            "shape": module.need("weight_shape", ("I64", "I32"), (2,)),
            "scale": module.need("weight_scale", FLOATS, *grid.stored_shapes),
        }
        if self.has_zero_points:
            shape = (words_for(rows, self.bits, across=across), grid.shape[1])
            parts["zeros"] = module.need("weight_zero_point", ("I32",), shape)
        if self.ordered or "weight_g_idx" in module.entries:
            parts["g_idx"] = module.need("weight_g_idx", ("I32", "I64"), (columns,))
        rows_of = partial(self._rows, grid=grid, across=across)
        multiple = 32 if across else 32 // self.bits
        name = f"{module.name}.weight"
        return CodedWeight(name, (rows, columns), parts, rows_of, multiple, self.block)

    def _columns(self, module: ModuleTensors, words: int) -> int:
        bits = self.bits
        if self.block[0] == 1 and self.block[1]:
            columns = module.matrix("weight_scale", FLOATS)[1] * self.block[1]
        elif 32 % bits:
            raise WeightFormatError(f"codes of {bits} bits without a group_size, {ADVICE}")
        else:
            columns = words * 32 // bits
        dense, spaced = (words_for(columns, bits, across=across) for across in (True, False))
        if dense == spaced and 32 % bits and columns > 32 // bits:
            raise WeightFormatError(
                f"'{module.name}.weight_packed' may hold {columns} codes of {bits} bits in two ways, {ADVICE}"
            )
        if words not in (dense, spaced):
            raise WeightFormatError(
                f"'{module.name}.weight_packed' has {words} words in a row, which hold no "
                f"{columns} codes of {bits} bits"
            )
        return columns

    def _rows(self, tensors: Tensors, start: int, stop: int, *, grid: Grid, across: bool) -> Tensor:
        if tensors["shape"].tolist() != [grid.rows, grid.columns]:
            raise WeightFormatError(f"a weight_shape is not {[grid.rows, grid.columns]}, as its codes are")
        codes = unpack(tensors["codes"][start:stop], self.bits, grid.columns, across=across)
        zeros = torch.full((1, grid.shape[1]), 1 << (self.bits - 1), dtype=torch.int32)
        if "zeros" in tensors:
            first, last = (words_for(n, self.bits, across=across) for n in (start, stop))
            words = tensors["zeros"][first:last].t()
            zeros = unpack(words, self.bits, stop - start, across=across).t()
        group = tensors.get("g_idx")
        # -1 stands for an order that was never set
        group = None if group is None or (group == -1).any() else group
        order = order_of(group, grid.columns, grid.shape[1])
        scales = grid.take(tensors["scale"].float(), start, stop)
        if order is not None:
            scales, zeros = scales.index_select(1, order), zeros.index_select(1, order)
        return dequantise(codes, scales, zeros)
