"""compressed-tensors' `pack-quantized`: codes in int32 words along the rows.

Source: `compressors/pack_quantized` of compressed-tensors 0.17, which leaves the bits of a word
over that hold no whole code, and of 0.20, which goes on in the next word; a file's shapes tell.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.model.layouts.coded import ADVICE, FLOATS, CodedWeight, LayoutError, Module, Tensors
from calib.model.layouts.grid import Grid
from calib.model.layouts.scaled import present
from calib.model.layouts.unpacking import unpack, words_for


def packed_weight(
    module: Module,
    bits: int,
    block: tuple[int | None, int | None],
    *,
    has_zero_points: bool,
    also: tuple[str, ...],
) -> CodedWeight:
    """`weight_packed` [rows, words], `weight_scale` per `block`, whose None is the whole weight.

    `weight_zero_point` is packed down the columns; `weight_g_idx` [columns] is each column's group.
    """
    rows, words = module.matrix("weight_packed", ("I32",))
    columns = _columns(module, bits, block[1], words)
    grid = Grid(rows, columns, (block[0] or rows, block[1] or columns))
    across = words == words_for(columns, bits)
    parts = {
        "codes": f"{module.name}.weight_packed",
        "shape": module.need("weight_shape", ("I64", "I32"), (2,)),
        "scale": module.need("weight_scale", FLOATS, *grid.stored_shapes),
    }
    if has_zero_points and grid.shape[0] != rows:
        raise LayoutError(f"one zero point for several rows of '{module.name}', {ADVICE}")
    if has_zero_points:
        shape = (words_for(rows, bits, across=across), grid.shape[1])
        parts["zero_point"] = module.need("weight_zero_point", ("I32",), shape)
    if "weight_g_idx" in module.entries:
        parts["g_idx"] = module.need("weight_g_idx", ("I32", "I64"), (columns,))
    return CodedWeight(
        f"{module.name}.weight", (rows, columns), parts, _Rows(bits, grid, across),
        ("scale",), multiple=32 if across else 32 // bits, also=present(module, also),
    )  # fmt: skip


def _columns(module: Module, bits: int, group_size: int | None, words: int) -> int:
    if group_size:
        columns = module.matrix("weight_scale", FLOATS)[1] * group_size
    elif 32 % bits:
        raise LayoutError(f"codes of {bits} bits without a group_size, {ADVICE}")
    else:
        columns = words * 32 // bits
    dense, spaced = (words_for(columns, bits, across=across) for across in (True, False))
    if dense == spaced and 32 % bits and columns > 32 // bits:
        raise LayoutError(
            f"'{module.name}.weight_packed' may hold {columns} codes of {bits} bits in two ways, "
            f"{ADVICE}"
        )
    if words not in (dense, spaced):
        raise LayoutError(
            f"'{module.name}.weight_packed' has {words} words in a row, which hold no {columns} "
            f"codes of {bits} bits"
        )
    return columns


@dataclass(frozen=True)
class _Rows:
    """Decodes rows [start, stop), where `start` is a multiple of the codes in a word."""

    bits: int
    grid: Grid
    across: bool  # words

    def __call__(self, tensors: Tensors, start: int, stop: int) -> Tensor:
        grid, bits = self.grid, self.bits
        if tensors["shape"].tolist() != [grid.rows, grid.columns]:
            raise LayoutError(
                f"a weight_shape is not {[grid.rows, grid.columns]}, as its codes are"
            )
        codes = unpack(tensors["codes"][start:stop], bits, grid.columns, across=self.across)
        scales = tensors["scale"].float().reshape(grid.shape)
        scales = scales[start:stop] if grid.shape[0] > 1 else scales
        zeros, order = self._zeros(tensors, start, stop), self._order(tensors.get("g_idx"))
        if order is not None:
            return (codes - zeros[:, order]) * scales[:, order]
        codes = codes.reshape(stop - start, grid.shape[1], -1)
        return ((codes - zeros.unsqueeze(2)) * scales.unsqueeze(2)).flatten(1)

    def _zeros(self, tensors: Tensors, start: int, stop: int) -> Tensor:
        packed = tensors.get("zero_point")
        if packed is None:
            return torch.full((1, self.grid.shape[1]), 1 << (self.bits - 1), dtype=torch.int32)
        first, last = (words_for(n, self.bits, across=self.across) for n in (start, stop))
        return unpack(packed[first:last].t(), self.bits, stop - start, across=self.across).t()

    def _order(self, order: Tensor | None) -> Tensor | None:
        """The group of each column; None: groups follow each other."""
        # -1 stands for an order that was never set
        if order is None or (order == -1).any():
            return None
        if order.min() < 0 or order.max() >= self.grid.shape[1]:
            raise LayoutError(f"a weight_g_idx is beyond the {self.grid.shape[1]} groups there are")
        return order.long()
