"""AWQ: 4-bit codes as in AutoAWQ's `gemm`, eight in a word, in an order of their own.

Source: `WQLinear_GEMM.from_linear` of AutoAWQ 0.2. The factors that AWQ folds into norms and other
weights are part of the model, and stay where they are.
"""

from dataclasses import dataclass

import torch

from calib.models.quantized.bits import unpack_words
from calib.models.quantized.coded_weight import Codes, ModuleTensors, Tensors, WeightFormat, WeightScheme
from calib.models.quantized.config import FormatError, QuantizationConfig

# first bits of the eight output channels of a word
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


def read_awq(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config`."""
    config.choice("bits", (4,))
    for key in ("version", "checkpoint_format"):  # AutoAWQ's, GPTQModel's
        config.choice(key, ("gemm", "GEMM"), "gemm")
    block = (1, config.group_size(128))
    scheme = AwqScheme(block, codes="qweight", zeros="qzeros", scales=("scales",))
    return WeightFormat("AWQ", scheme, codes=("qweight",))
