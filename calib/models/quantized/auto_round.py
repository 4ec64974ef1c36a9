"""AutoRound's own format, whose tensors are those of GPTQ or AWQ.

Source: `export_to_autoround` of AutoRound 0.16.
"""

from calib.models.quantized.awq import read_awq
from calib.models.quantized.coded_weight import WeightFormat
from calib.models.quantized.config import ADVICE, FormatError, QuantizationConfig
from calib.models.quantized.gptq import read_gptq

# packing_format -> a reader, and the setting that it needs
_FORMATS = {
    "auto_round:auto_gptq": (read_gptq, {"checkpoint_format": "gptq"}),
    "auto_round": (read_gptq, {"checkpoint_format": "gptq_v2"}),
    "auto_round:auto_awq": (read_awq, {"version": "gemm"}),
}


def read_auto_round(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config`."""
    read, setting = _FORMATS[config.choice("packing_format", tuple(_FORMATS))]
    config.choice("data_type", ("int",), "int")
    # a module of 16 bits is left alone
    if any(module.get("bits") != 16 for module in config.sections("extra_config").values()):
        raise FormatError(f"'extra_config' gives modules bits of their own, {ADVICE}")
    return read(QuantizationConfig({**config, **setting}))
