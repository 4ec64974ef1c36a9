"""GPTQ, AWQ and AutoRound: integers of a few bits in int32 words, with scales for groups of input channels.

Sources: `QuantLinear.pack` of AutoGPTQ 0.7 and GPTQModel 5 (`gptq` and `gptq_v2`), whose words go down the
columns; `WQLinear_GEMM.from_linear` of AutoAWQ 0.2 (`gemm`), eight codes in a word in an order of their own;
`export_to_autoround` of AutoRound 0.16, whose own format has the tensors of either. The factors that AWQ
folds into norms and other weights are part of the model, and stay where they are.
"""

from dataclasses import dataclass

import torch

from calib.models.quantized.coded_weight import (
    Codes,
    ModuleTensors,
    Tensors,
    WeightFormat,
    WeightScheme,
    count_words,
    unpack_words,
)
from calib.models.quantized.config import ADVICE, FormatError, QuantizationConfig

# first bits of the eight output channels of a word of AWQ
_SHIFTS = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32) * 4


@dataclass(frozen=True)
class AwqScheme(WeightScheme):
    """Codes [in, out / 8], zero points [groups, out / 8], scales [groups, out]."""

    dtype: str = "I32"
    has_zeros: bool | None = True
    is_transposed: bool = True
    is_signed: bool = False  # codes and zero points are from -8 to 7, not from 0 to 15

    def _measure(self, module: ModuleTensors, high: int, wide: int) -> tuple[int, int, int]:
        if "g_idx" in module.entries:
            raise FormatError(f"'{module.name}' has a g_idx, as GPTQ's weights do, not AWQ's")
        return wide * 8, high, wide

    def _unpack(self, tensors: Tensors, rows: slice) -> Codes:
        parts = (unpack_words(tensors[part], 4, rows, shifts=_SHIFTS).t() for part in ("codes", "zeros"))
        codes, zeros = ((part ^ 8) - 8 if self.is_signed else part for part in parts)
        return codes, zeros


@dataclass(frozen=True)
class GptqScheme(WeightScheme):
    """`qweight` [in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales` [groups, out]."""

    codes: str = "qweight"
    dtype: str = "I32"
    scales: tuple[str, ...] = ("scales",)
    zeros: str = "qzeros"
    has_zeros: bool | None = True
    g_idx: str | None = "g_idx"
    is_transposed: bool = True
    bits: int = 4
    offset: int = 1  # added to a zero point of the file
    is_symmetric: bool = False

    def _measure(self, module: ModuleTensors, high: int, wide: int) -> tuple[int, int, int]:
        columns = high * 32 // self.bits
        if count_words(columns, self.bits) != high or wide * self.bits % 32:
            raise FormatError(
                f"'{module.name}.qweight' is {[high, wide]}: codes of {self.bits} bits do not fill its words"
            )
        return wide, columns, wide * self.bits // 32

    def _unpack(self, tensors: Tensors, rows: slice) -> Codes:
        """Unpack codes and zero points; refuse zero points that tools read differently."""
        words = tensors["codes"][:, rows]
        codes = unpack_words(words, self.bits, slice(0, len(words) * 32 // self.bits), dim=0)
        zeros = unpack_words(tensors["zeros"], self.bits, rows) + self.offset
        if (zeros == 1 << self.bits).any():
            raise FormatError(
                f"a zero point is stored as {(1 << self.bits) - 1}, which AutoGPTQ reads as 0 and "
                f"GPTQModel as {1 << self.bits}; give the model it was made from"
            )
        if self.is_symmetric and (zeros != 1 << (self.bits - 1)).any():
            raise FormatError(
                "a zero point is not in the middle, where its config.json says sym, and engines "
                "take it to be; give the model it was made from"
            )
        return codes.t(), zeros.t()


def read_awq(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config` of AWQ."""
    config.choice("bits", (4,))
    for key in ("version", "checkpoint_format"):  # AutoAWQ's, GPTQModel's
        config.choice(key, ("gemm", "GEMM"), "gemm")
    scheme = AwqScheme((1, config.group_size(128)), codes="qweight", zeros="qzeros", scales=("scales",))
    return WeightFormat("AWQ", scheme, codes=("qweight",))


def read_gptq(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config` of GPTQ; FormatError for bits that differ by module."""
    form = config.choice("checkpoint_format", ("gptq", "gptq_v2"), config.get("format") or "gptq")
    config.choice("pack_dtype", ("int32",), "int32")
    if any(not pattern.startswith("-:") for pattern in config.section("dynamic")):
        raise FormatError(f"'dynamic' gives modules bits of their own, {ADVICE}")
    scheme = GptqScheme(
        (1, config.group_size(128)),
        requires_g_idx=config.get("desc_act") is True,
        bits=config.choice("bits", (2, 3, 4, 8)),
        offset=1 if form == "gptq" else 0,  # the first version stores zero points less one
        is_symmetric=config.get("sym") is True,
    )
    return WeightFormat("GPTQ", scheme, codes=("qweight",))


# packing_format of AutoRound -> a reader, and the setting that it needs
_AUTO_ROUND = {
    "auto_round:auto_gptq": (read_gptq, {"checkpoint_format": "gptq"}),
    "auto_round": (read_gptq, {"checkpoint_format": "gptq_v2"}),
    "auto_round:auto_awq": (read_awq, {"version": "gemm"}),
}


def read_auto_round(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config` of AutoRound; FormatError for bits that differ by module."""
    read, setting = _AUTO_ROUND[config.choice("packing_format", tuple(_AUTO_ROUND))]
    config.choice("data_type", ("int",), "int")
    # a module of 16 bits is left alone
    if any(module.get("bits") != 16 for module in config.sections("extra_config").values()):
        raise FormatError(f"'extra_config' gives modules bits of their own, {ADVICE}")
    return read(QuantizationConfig({**config, **setting}))
