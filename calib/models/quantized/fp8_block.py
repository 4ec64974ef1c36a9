"""`quant_method: fp8`: FP8 with a scale per tile, as DeepSeek and Qwen publish, or per weight.

Source: `fp8_cast_bf16.py` of DeepSeek-V3 (a weight is its codes times `weight_scale_inv`), and
vLLM's `fp8.py` for the older form with a `weight_scale`.
"""

from typing import Any

from calib.models.quantized.coded_weight import FLOATS, known, two_sizes
from calib.models.quantized.scaled import ByName, Scaled

_SCALE_DTYPES = (*FLOATS, "F8_E8M0")


def read_fp8(says: dict[str, Any]) -> ByName:
    """Read a `quantization_config`."""
    known("fmt", says.get("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    size = says.get("weight_block_size")
    if size is None:
        whole = Scaled(scales=("weight_scale", "weight_scale_inv"), scale_dtypes=_SCALE_DTYPES)
        return ByName("FP8", whole)
    tile = two_sizes("weight_block_size", size)
    return ByName("FP8", Scaled(tile, scales=("weight_scale_inv",), scale_dtypes=_SCALE_DTYPES))
