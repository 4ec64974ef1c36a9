"""Scales that hold for blocks of a matrix: the whole of it, its rows, groups of a row, tiles."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """The blocks of a matrix [rows, columns]; each has one scale."""

    rows: int
    columns: int
    block: tuple[int, int]  # rows and columns of a block

    @property
    def shape(self) -> tuple[int, int]:
        """How many blocks there are, down and across."""
        (rows, columns), (high, wide) = (self.rows, self.columns), self.block
        return -(-rows // high), -(-columns // wide)

    @property
    def stored_shapes(self) -> list[tuple[int, ...]]:
        """Shapes that the scales may have in a file."""
        down, across = self.shape
        found: list[tuple[int, ...]] = [(down, across), *([(down,)] if across == 1 else [])]
        # the last is ModelOpt's of tiles
        return [*found, *([()] if down * across == 1 else []), (down, 1, across, 1)]

    def spread(self, scales: Tensor, start: int, stop: int) -> Tensor:
        """Give each value of the rows [start, stop) its scale: [stop - start, columns], or 1 wide.

        `scales` has one of the stored shapes.
        """
        down, across = self.shape
        scales = scales.reshape(down, across)
        scales = scales[torch.arange(start, stop) // self.block[0]] if down > 1 else scales
        if across == 1:
            return scales
        return scales.repeat_interleave(self.block[1], dim=1)[:, : self.columns]
