"""AWQ as AutoAWQ's `gemm` version stores it: 4-bit codes, eight in a word, in an order of its own.

Source: `WQLinear_GEMM.from_linear` of AutoAWQ 0.2. The factors that AWQ folds into norms and other
weights are part of the model, and stay where they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
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
    known,
)
from calib.model.layouts.numbers import dequantise, unpack

# output channel k of eight is in these bits
_SHIFTS = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32) * 4


@dataclass(frozen=True)
class Awq:
    """Codes [in, out / 8], zero points [groups, out / 8], scales [groups, out], and their `names`.

    Codes and zero points are from 0 to 15, or from -8 to 7 if `signed`.
    """

    group_size: int | None
    names: tuple[str, str, str] = ("qweight", "qzeros", "scales")
    signed: bool = False

    label = "AWQ"

    @classmethod
    def read(cls, says: dict[str, Any]) -> "Awq":
        """Read a `quantization_config`."""
        known("bits", says.get("bits"), (4,))
        for key in ("version", "checkpoint_format"):  # AutoAWQ's, GPTQModel's
            known(key, str(says.get(key, "gemm")).lower(), ("gemm",))
        return cls(group_size_of(says, 128))

    def weights(self, module: Module) -> Iterable[CodedWeight]:
        """The weight of a module that has a `qweight`."""
        if "g_idx" in module.entries and "qweight" in module.entries:
            raise LayoutError(f"'{module.name}' has a g_idx, as GPTQ's weights do, not AWQ's")
        if "qweight" in module.entries:
            yield self.weight(module)

    def weight(self, module: Module) -> CodedWeight:
        """The weight of `module`."""
        codes, zeros, scales = self.names
        columns, packed = module.matrix(codes, ("I32",))
        groups = module.groups(columns, self.group_size)
        parts = {
            "codes": f"{module.name}.{codes}",
            "zeros": module.need(zeros, ("I32",), (groups, packed)),
            "scales": module.need(scales, FLOATS, (groups, packed * 8)),
        }
        shape = (packed * 8, columns)
        name, block = f"{module.name}.weight", (1, self.group_size)
        return CodedWeight(name, shape, parts, self._rows, multiple=8, block=block)

    def _rows(self, tensors: Tensors, start: int, stop: int) -> Tensor:
        words = slice(start // 8, stop // 8)
        codes, zeros = (self._unpack(tensors[part][:, words]) for part in ("codes", "zeros"))
        scales = tensors["scales"][:, start:stop].float()
        return dequantise(codes.t(), scales.t(), zeros.t())

    def _unpack(self, words: Tensor) -> Tensor:
        codes = unpack(words, 4, words.shape[-1] * 8, first=_SHIFTS)
        return (codes ^ 8) - 8 if self.signed else codes
