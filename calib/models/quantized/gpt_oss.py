"""gpt-oss: the experts' fused weights in MXFP4, a byte for two values, a power of two for 32.

Source: `convert_moe_packed_tensors` of transformers' `integrations/mxfp4.py`.
"""

from collections.abc import Iterable

from torch import Tensor

from calib.models.quantized.bits import scales_to_float
from calib.models.quantized.coded_weight import (
    E8M0,
    CodedWeight,
    ModuleTensors,
    Shape,
    Tensors,
    WeightFormat,
    WeightScheme,
)
from calib.models.quantized.config import ADVICE, FormatError, QuantizationConfig
from calib.models.quantized.fp4 import unpack_fp4


class ExpertsScheme(WeightScheme):
    """Blocks [experts, out, groups, 16] and their scales [experts, out, groups]."""

    def decode(self, shape: Shape, tensors: Tensors, rows: slice) -> Tensor:
        """Decode `rows`, each of which is an expert [in, out]."""
        values = unpack_fp4(tensors["codes"][rows])  # [experts, out, groups, 32]
        scales = scales_to_float(tensors["scale"][rows])
        return (values * scales.unsqueeze(-1)).flatten(-2).transpose(1, 2)


class ExpertsFormat(WeightFormat):
    """Modules of experts, which hold several weights each: `X_blocks` and `X_scales` of a weight X."""

    def weights(self, module: ModuleTensors) -> Iterable[CodedWeight]:
        """Yield the fused weights of a module."""
        for part in sorted(part for part in module.entries if part.endswith("_blocks")):
            weight, codes = part.removesuffix("_blocks"), module.require(part, ("U8",))
            shape = module.entries[part].shape
            if len(shape) != 4 or shape[3] != 16 or 0 in shape:
                raise FormatError(f"'{codes}' is {[*shape]}, {ADVICE}")
            experts, rows, groups = shape[:3]
            parts = {"codes": codes, "scale": module.require(f"{weight}_scales", E8M0, shape[:3])}
            shape = (experts, groups * 32, rows)
            yield CodedWeight(f"{module.name}.{weight}", shape, parts, ExpertsScheme())


def read_gpt_oss(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config`, which has nothing to choose."""
    return ExpertsFormat("MXFP4", None)
