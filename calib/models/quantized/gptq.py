"""GPTQ and AWQ: codes of a few bits in int32 words [in, out], with groups of input channels.

Source: `QuantLinear.pack` of AutoGPTQ 0.7 and GPTQModel 5 (`gptq` and `gptq_v2`);
`WQLinear_GEMM.from_linear` of AutoAWQ 0.2; `export_to_autoround` of AutoRound 0.16, whose own
format holds the tensors of either. The factors that AWQ folds into norms and other weights are
part of the model, and stay where they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calib.models.quantized.coded_weight import (
    ADVICE,
    FLOATS,
    CodedWeight,
    ModuleTensors,
    Tensors,
    WeightFormatError,
    group_size_of,
    known,
    section,
)
from calib.models.quantized.numbers import dequantise, order_of, unpack, unpack_down, words_for

# AWQ: output channel k of eight is in these bits
_SHIFTS = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32) * 4
# AutoRound's own formats, by GPTQ's zero points
_AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round": "gptq_v2"}
_AUTO_AWQ = "auto_round:auto_awq"


@dataclass(frozen=True)
class Gptq:
    """Codes of 2, 3, 4 or 8 bits, packed down the columns.

    `qweight` [in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales` [groups, out].
    `g_idx` [in] names the group of each input channel; without it groups follow each other.
    """

    bits: int
    group_size: int | None
    offset: int  # what is added to a stored zero point
    symmetric: bool
    ordered: bool

    label = "GPTQ"

    @classmethod
    def read(cls, says: dict[str, Any]) -> "Gptq":
        """Read a `quantization_config`."""
        form = says.get("checkpoint_format", says.get("format", "gptq"))
        known("checkpoint_format", form, ("gptq", "gptq_v2"))
        known("pack_dtype", says.get("pack_dtype", "int32"), ("int32",))
        if any(not key.startswith("-:") for key in section(says, "dynamic")):
            raise WeightFormatError(f"'dynamic' gives modules bits of their own, {ADVICE}")
        bits = known("bits", says.get("bits"), (2, 3, 4, 8))
        flags = [says.get(key) is True for key in ("sym", "desc_act")]
        # the first version stores zero points less one
        return cls(bits, group_size_of(says, 128), 1 if form == "gptq" else 0, *flags)

    def weights(self, module: ModuleTensors) -> Iterable[CodedWeight]:
        """The weight of a module that has a `qweight`."""
        if "qweight" not in module.entries:
            return
        packed, rows = module.matrix("qweight", ("I32",))
        columns = packed * 32 // self.bits
        groups = module.groups(columns, self.group_size)
        if words_for(columns, self.bits) != packed or rows * self.bits % 32:
            raise WeightFormatError(
                f"'{module.name}.qweight' is {[packed, rows]}: no whole number of words holds "
                f"codes of {self.bits} bits"
            )
        parts = {
            "codes": f"{module.name}.qweight",
            "zeros": module.need("qzeros", ("I32",), (groups, rows * self.bits // 32)),
            "scales": module.need("scales", FLOATS, (groups, rows)),
        }
        if self.ordered or "g_idx" in module.entries:
            parts["g_idx"] = module.need("g_idx", ("I32", "I64"), (columns,))
        rows_of = partial(self._rows, columns=columns, groups=groups)
        name, block = f"{module.name}.weight", (1, self.group_size)
        yield CodedWeight(name, (rows, columns), parts, rows_of, multiple=32, block=block)

    def _rows(self, tensors: Tensors, start: int, stop: int, *, columns: int, groups: int) -> Tensor:
        codes = unpack_down(tensors["codes"][:, start:stop], self.bits, columns)
        words = slice(start * self.bits // 32, words_for(stop, self.bits))
        zeros = unpack(tensors["zeros"][:, words], self.bits, stop - start) + self.offset
        self._check(zeros)
        scales = tensors["scales"][:, start:stop].float()
        order = order_of(tensors.get("g_idx"), columns, groups)
        if order is not None:
            scales, zeros = scales[order], zeros[order]
        return dequantise(codes.t(), scales.t(), zeros.t())

    def _check(self, zeros: Tensor) -> None:
        """Refuse zero points that tools read differently."""
        if (zeros == 1 << self.bits).any():
            raise WeightFormatError(
                f"a zero point is stored as {(1 << self.bits) - 1}, which AutoGPTQ reads as 0 and "
                f"GPTQModel as {1 << self.bits}; give the model it was made from"
            )
        if self.symmetric and (zeros != 1 << (self.bits - 1)).any():
            raise WeightFormatError(
                "a zero point is not in the middle, where its config.json says sym, and engines "
                "take it to be; give the model it was made from"
            )


@dataclass(frozen=True)
class Awq:
    """4-bit codes as in AutoAWQ's `gemm`: eight in a word, in an order of its own.

    Codes [in, out / 8], zero points [groups, out / 8], scales [groups, out], and their `names`.
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

    def weights(self, module: ModuleTensors) -> Iterable[CodedWeight]:
        """The weight of a module that has a `qweight`."""
        if "g_idx" in module.entries and "qweight" in module.entries:
            raise WeightFormatError(f"'{module.name}' has a g_idx, as GPTQ's weights do, not AWQ's")
        if "qweight" in module.entries:
            yield self.weight(module)

    def weight(self, module: ModuleTensors) -> CodedWeight:
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


def read_auto_round(says: dict[str, Any]) -> Gptq | Awq:
    """Read a `quantization_config` of AutoRound's own format."""
    form = known("packing_format", says.get("packing_format"), (*_AUTO_ROUND, _AUTO_AWQ))
    known("data_type", says.get("data_type", "int"), ("int",))
    own = section(says, "extra_config")
    # 16 bits: a module that is left alone
    if any(section(own, module).get("bits") != 16 for module in own):
        raise WeightFormatError(f"'extra_config' gives modules bits of their own, {ADVICE}")
    if form == _AUTO_AWQ:
        return Awq.read({**says, "version": "gemm"})
    return Gptq.read({**says, "checkpoint_format": _AUTO_ROUND[form]})
