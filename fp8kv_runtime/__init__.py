"""FP8 paged-attention runtime: the number format, and the bridge to transformers."""

from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize, fp8_max, quantize, scale_from_amax

__all__ = ["FP8_DTYPES", "dequantize", "fp8_max", "quantize", "scale_from_amax"]
