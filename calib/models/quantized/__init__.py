"""Formats of quantised weights, a file each; `WEIGHT_FORMATS` names them as configs do."""

from collections.abc import Callable

from calib.models.quantized.awq import read_awq
from calib.models.quantized.coded_weight import WeightFormat
from calib.models.quantized.compressed_tensors import read_compressed_tensors
from calib.models.quantized.config import QuantizationConfig
from calib.models.quantized.fp8 import read_fp8
from calib.models.quantized.gpt_oss import read_gpt_oss
from calib.models.quantized.gptq import read_auto_round, read_gptq
from calib.models.quantized.modelopt import read_modelopt
from calib.models.quantized.quark import read_quark

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
