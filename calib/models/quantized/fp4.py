"""NVFP4 and MXFP4: FP4 codes, two in a byte, and a scale for 16 or 32 of them."""

from dataclasses import dataclass

from calib.models.quantized.bits import unpack_fp4
from calib.models.quantized.coded_weight import BYTE, E8M0, FP8, Codes, ModuleTensors, Tensors, WeightScheme


@dataclass(frozen=True)
class Fp4Scheme(WeightScheme):
    """Two codes in a byte, the first in its lower half."""

    dtype: str = BYTE

    def _measure(self, module: ModuleTensors, high: int, wide: int) -> tuple[int, int, int]:
        return high, 2 * wide, 0

    def _unpack(self, tensors: Tensors, rows: slice) -> Codes:
        return unpack_fp4(tensors["codes"][rows]), None


MXFP4 = Fp4Scheme((1, 32), scale_dtypes=E8M0)
NVFP4 = Fp4Scheme((1, 16), scale_dtypes=(FP8,), second_scale="weight_scale_2")
