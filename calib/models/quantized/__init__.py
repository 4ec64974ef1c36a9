"""Forms of quantised weights, a file each. `WEIGHT_FORMATS` names them as configs do."""

from collections.abc import Callable
from typing import Any

from calib.models.quantized.coded_weight import WeightFormat
from calib.models.quantized.compressed_tensors import CompressedTensors
from calib.models.quantized.fp8_block import read_fp8
from calib.models.quantized.gpt_oss import GptOss
from calib.models.quantized.gptq import Awq, Gptq, read_auto_round
from calib.models.quantized.modelopt import read_modelopt
from calib.models.quantized.quark import read_quark

# quant_method -> what reads a config that says so
WEIGHT_FORMATS: dict[str, Callable[[dict[str, Any]], WeightFormat]] = {
    "auto-round": read_auto_round,
    "awq": Awq.read,
    "compressed-tensors": CompressedTensors.read,
    "fp8": read_fp8,
    "gptq": Gptq.read,
    "modelopt": read_modelopt,
    "mxfp4": GptOss.read,
    "quark": read_quark,
}
