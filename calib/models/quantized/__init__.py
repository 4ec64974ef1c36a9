"""Formats of quantised weights; `WEIGHT_FORMATS` names them as configs do."""

from collections.abc import Callable

from calib.models.quantized.coded_weight import WeightFormat
from calib.models.quantized.compressed_tensors import read_compressed_tensors
from calib.models.quantized.config import QuantizationConfig
from calib.models.quantized.packed_integers import read_auto_round, read_awq, read_gptq
from calib.models.quantized.vendors import read_fp8, read_gpt_oss, read_modelopt, read_quark

# quant_method -> the reader of such a config
WEIGHT_FORMATS: dict[str, Callable[[QuantizationConfig], WeightFormat]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_gpt_oss,
    "quark": read_quark,
}
