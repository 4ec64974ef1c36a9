"""NVFP4 and MXFP4: FP4 codes, two in a byte, and a scale for 16 or 32 of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.models.quantized.coded_weight import E8M0, Codes, ModuleTensors, Tensors, WeightScheme

# the magnitudes of FP4 E2M1; codes from 8 on are negative
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Fp4Scheme(WeightScheme):
    """Two codes in a byte, the first in its lower half."""

    dtype: str = "U8"

    def _measure(self, module: ModuleTensors, high: int, wide: int) -> tuple[int, int, int]:
        return high, 2 * wide, 0

    def _unpack(self, tensors: Tensors, rows: slice) -> Codes:
        return unpack_fp4(tensors["codes"][rows]), None


MXFP4 = Fp4Scheme((1, 32), scale_dtypes=E8M0)
NVFP4 = Fp4Scheme((1, 16), scale_dtypes=("F8_E4M3",), second_scale="weight_scale_2")


def unpack_fp4(packed: Tensor) -> Tensor:
    """Unpack FP4 E2M1, the first of two in the lower half of a byte: uint8 [..., n] to float32 [..., 2n]."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[codes.int()]
