"""gpt-oss: the experts' fused weights in MXFP4, a byte for two values, a power of two for 32.

Source: `convert_moe_packed_tensors` of transformers' `integrations/mxfp4.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from calib.models.quantized.coded_weight import ADVICE, CodedWeight, ModuleTensors, Tensors, WeightFormatError
from calib.models.quantized.numbers import powers_of_two, unpack_fp4
from calib.models.quantized.scaled import E8M0


@dataclass(frozen=True)
class GptOss:
    """`X_blocks` [experts, out, groups, 16] and `X_scales` [experts, out, groups] of each `X`."""

    label = "MXFP4"

    @classmethod
    def read(cls, says: dict[str, Any]) -> "GptOss":
        """Read a `quantization_config`, which has nothing to choose."""
        return cls()

    def weights(self, module: ModuleTensors) -> Iterable[CodedWeight]:
        """The fused weights of a module of experts, each [experts, in, out]."""
        for part in sorted(module.entries):
            if not part.endswith("_blocks"):
                continue
            name, shape = part.removesuffix("_blocks"), module.entries[part].shape
            module.need(part, ("U8",))
            if len(shape) != 4 or shape[3] != 16 or 0 in shape:
                raise WeightFormatError(f"'{module.name}.{part}' is {list(shape)}, {ADVICE}")
            parts = {
                "codes": f"{module.name}.{part}",
                "scale": module.need(f"{name}_scales", E8M0, shape[:3]),
            }
            experts, rows, groups = shape[:3]
            full = (experts, groups * 32, rows)
            yield CodedWeight(f"{module.name}.{name}", full, parts, _experts)


def _experts(tensors: Tensors, start: int, stop: int) -> Tensor:
    values = unpack_fp4(tensors["codes"][start:stop])  # [experts, out, groups, 32]
    scales = powers_of_two(tensors["scale"][start:stop])
    return (values * scales.unsqueeze(-1)).flatten(-2).transpose(1, 2)
