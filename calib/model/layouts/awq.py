"""AWQ as AutoAWQ's `gemm` version stores it: 4-bit codes, eight in a word, in an order of its own.

Source: `WQLinear_GEMM.from_linear` of AutoAWQ 0.2. The factors that AWQ folds into norms and other
weights are part of the model, and stay where they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calib.model.layouts.coded import (
    FLOATS,
    CodedWeight,
    LayoutError,
    Module,
    Tensors,
    group_size_of,
    groups_in,
    setting,
)

# output channel k of eight is in these bits
_SHIFTS = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32) * 4


@dataclass(frozen=True)
class Awq:
    """`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]."""

    group_size: int | None

    label = "AWQ"

    @classmethod
    def read(cls, says: dict[str, Any]) -> "Awq":
        """Read a `quantization_config`."""
        setting(says, "bits", (4,), None)
        setting({"version": str(says.get("version", "gemm")).lower()}, "version", ("gemm",), None)
        return cls(group_size_of(says, 128))

    def weights(self, module: Module) -> Iterable[CodedWeight]:
        """The weight of a module that has a `qweight`."""
        if "qweight" not in module.entries:
            return
        if "g_idx" in module.entries:
            raise LayoutError(f"'{module.name}' has a g_idx, as GPTQ's weights do, not AWQ's")
        yield awq_weight(module, self.group_size, ("qweight", "qzeros", "scales"))


def awq_weight(
    module: Module, group_size: int | None, names: tuple[str, str, str], *, signed: bool = False
) -> CodedWeight:
    """Codes [in, out / 8], zero points [groups, out / 8], scales [groups, out], by their `names`.

    Codes and zero points are from 0 to 15, or from -8 to 7 if `signed`.
    """
    codes, zeros, scales = names
    columns, packed = module.matrix(codes, ("I32",))
    groups = groups_in(module, columns, group_size)
    parts = {
        "codes": f"{module.name}.{codes}",
        "zeros": module.need(zeros, ("I32",), (groups, packed)),
        "scales": module.need(scales, FLOATS, (groups, packed * 8)),
    }
    return CodedWeight(
        f"{module.name}.weight", (packed * 8, columns), parts,
        partial(_rows, groups=groups, signed=signed), ("scales",), multiple=8,
    )  # fmt: skip


def _rows(tensors: Tensors, start: int, stop: int, *, groups: int, signed: bool) -> Tensor:
    words = slice(start // 8, stop // 8)
    codes, zeros = (_unpack(tensors[part][:, words], signed) for part in ("codes", "zeros"))
    scales = tensors["scales"][:, start:stop].float()
    centred = codes.view(groups, -1, stop - start) - zeros[:, None]
    return (centred * scales[:, None]).flatten(0, 1).t()


def _unpack(words: Tensor, signed: bool) -> Tensor:
    codes = ((words.unsqueeze(-1) >> _SHIFTS) & 15).flatten(-2)
    return (codes ^ 8) - 8 if signed else codes
