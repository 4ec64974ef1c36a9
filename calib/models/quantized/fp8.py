"""`quant_method: fp8`: FP8 with a scale per tile, as DeepSeek and Qwen publish, or per weight; and MXFP8.

Source: `fp8_cast_bf16.py` of DeepSeek-V3 (a weight is its codes times `weight_scale_inv`), and
vLLM's `fp8.py` for the older form with a `weight_scale`.
"""

from calib.models.quantized.coded_weight import E8M0, FLOATS, WeightFormat, WeightScheme
from calib.models.quantized.config import QuantizationConfig

MXFP8 = WeightScheme((1, 32), scale_dtypes=E8M0)
_SCALE_DTYPES = (*FLOATS, "F8_E8M0")


def read_fp8(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config`."""
    config.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    if config.get("weight_block_size") is None:
        scheme = WeightScheme(scales=("weight_scale", "weight_scale_inv"), scale_dtypes=_SCALE_DTYPES)
    else:
        tile = config.tile("weight_block_size")
        scheme = WeightScheme(tile, scales=("weight_scale_inv",), scale_dtypes=_SCALE_DTYPES)
    return WeightFormat("FP8", scheme)
