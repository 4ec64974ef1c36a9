"""Forms of quantised weights, a file each. `LAYOUTS` names them as configs do."""

from collections.abc import Callable
from typing import Any

from calib.model.layouts.coded import Layout
from calib.model.layouts.compressed import CompressedTensors
from calib.model.layouts.fp8_tiles import read_fp8
from calib.model.layouts.gpt_oss import GptOss
from calib.model.layouts.gptq import Awq, Gptq, read_auto_round
from calib.model.layouts.modelopt_weights import read_modelopt
from calib.model.layouts.quark import read_quark

# quant_method -> what reads a config that says so
LAYOUTS: dict[str, Callable[[dict[str, Any]], Layout]] = {
    "auto-round": read_auto_round,
    "awq": Awq.read,
    "compressed-tensors": CompressedTensors.read,
    "fp8": read_fp8,
    "gptq": Gptq.read,
    "modelopt": read_modelopt,
    "mxfp4": GptOss.read,
    "quark": read_quark,
}
