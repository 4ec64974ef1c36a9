"""GPTQ: codes of 2, 3, 4 or 8 bits, packed down the columns, with groups of input channels.

Source: `QuantLinear.pack` of AutoGPTQ 0.7 and GPTQModel 5 (`gptq` and `gptq_v2`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calib.model.layouts.coded import (
    ADVICE,
    FLOATS,
    CodedWeight,
    LayoutError,
    Module,
    Tensors,
    group_size_of,
    groups_in,
    section,
    setting,
)
from calib.model.layouts.unpacking import unpack, unpack_down, words_for


@dataclass(frozen=True)
class Gptq:
    """`qweight` [in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales` [groups, out].

    `g_idx` [in] names the group of each input channel; without it groups follow each other.
    """

    bits: int
    group_size: int | None
    offset: int  # what is added to a stored zero point

    label = "GPTQ"

    @classmethod
    def read(cls, says: dict[str, Any]) -> "Gptq":
        """Read a `quantization_config`."""
        form = setting(
            {"checkpoint_format": says.get("checkpoint_format", says.get("format", "gptq"))},
            "checkpoint_format", ("gptq", "gptq_v2"), "gptq",
        )  # fmt: skip
        setting(says, "pack_dtype", ("int32",), "int32")
        if any(not key.startswith("-:") for key in section(says, "dynamic")):
            raise LayoutError(f"'dynamic' gives modules bits of their own, {ADVICE}")
        bits = setting(says, "bits", (2, 3, 4, 8), None)
        # the first version stores zero points less one
        return cls(bits, group_size_of(says, 128), 1 if form == "gptq" else 0)

    def weights(self, module: Module) -> Iterable[CodedWeight]:
        """The weight of a module that has a `qweight`."""
        if "qweight" not in module.entries:
            return
        packed, rows = module.matrix("qweight", ("I32",))
        columns = packed * 32 // self.bits
        groups = groups_in(module, columns, self.group_size)
        if words_for(columns, self.bits) != packed or rows * self.bits % 32:
            raise LayoutError(
                f"'{module.name}.qweight' is {[packed, rows]}: no whole number of words holds "
                f"codes of {self.bits} bits"
            )
        parts = {
            "qweight": f"{module.name}.qweight",
            "qzeros": module.need("qzeros", ("I32",), (groups, rows * self.bits // 32)),
            "scales": module.need("scales", FLOATS, (groups, rows)),
        }
        if "g_idx" in module.entries:
            parts["g_idx"] = module.need("g_idx", ("I32", "I64"), (columns,))
        yield CodedWeight(
            f"{module.name}.weight", (rows, columns), parts, partial(self._rows, groups=groups),
            ("scales",), multiple=32,
        )  # fmt: skip

    def _rows(self, tensors: Tensors, start: int, stop: int, *, groups: int) -> Tensor:
        packed = tensors["qweight"][:, start:stop]
        columns = packed.shape[0] * 32 // self.bits
        words = slice(start * self.bits // 32, words_for(stop, self.bits))
        zeros = unpack(tensors["qzeros"][:, words], self.bits, stop - start) + self.offset
        if (zeros == 1 << self.bits).any():
            raise LayoutError(
                f"a zero point is stored as {(1 << self.bits) - 1}, which AutoGPTQ reads as 0 and "
                f"GPTQModel as {1 << self.bits}; give the model it was made from"
            )
        scales = tensors["scales"][:, start:stop].float()
        codes = unpack_down(packed, self.bits, columns)  # [in, out]
        group = _order(tensors.get("g_idx"), columns, groups)
        if group is not None:
            return ((codes - zeros[group]) * scales[group]).t()
        codes = codes.view(groups, -1, stop - start)
        return ((codes - zeros[:, None]) * scales[:, None]).flatten(0, 1).t()


def _order(group: Tensor | None, columns: int, groups: int) -> Tensor | None:
    """The group of each input channel; None: groups follow each other."""
    if group is None or torch.equal(group, torch.arange(columns).to(group) // (columns // groups)):
        return None
    if group.min() < 0 or group.max() >= groups:
        raise LayoutError(f"a g_idx names a group beyond the {groups} there are")
    return group.long()
