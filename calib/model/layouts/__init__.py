"""Forms of quantised weights, a file each. `LAYOUTS` names them as configs do."""

from collections.abc import Callable
from typing import Any

from calib.model.layouts.auto_round import read_auto_round
from calib.model.layouts.awq import Awq
from calib.model.layouts.coded import Layout
from calib.model.layouts.compressed import CompressedTensors
from calib.model.layouts.fp8_block import Fp8Block
from calib.model.layouts.gpt_oss import GptOss
from calib.model.layouts.gptq import Gptq
from calib.model.layouts.model_optimizer import ModelOptimizer
from calib.model.layouts.quark import Quark

# quant_method -> what reads a config that says so
LAYOUTS: dict[str, Callable[[dict[str, Any]], Layout]] = {
    "auto-round": read_auto_round,
    "awq": Awq.read,
    "compressed-tensors": CompressedTensors.read,
    "fp8": Fp8Block.read,
    "gptq": Gptq.read,
    "modelopt": ModelOptimizer.read,
    "mxfp4": GptOss.read,
    "quark": Quark.read,
}
