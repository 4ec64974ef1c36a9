"""AutoRound's own format, whose tensors are those of GPTQ or AWQ.

Source: `export_to_autoround` of AutoRound 0.16.
"""

from typing import Any

from calib.models.quantized.awq import read_awq
from calib.models.quantized.coded_weight import WeightFormat
from calib.models.quantized.gptq import read_gptq
from calib.models.quantized.settings import ADVICE, FormatError, check_choice, read_section

# packing_format -> a reader, and what it is to read
_FORMATS = {
    "auto_round:auto_gptq": (read_gptq, {"checkpoint_format": "gptq"}),
    "auto_round": (read_gptq, {"checkpoint_format": "gptq_v2"}),
    "auto_round:auto_awq": (read_awq, {"version": "gemm"}),
}


def read_auto_round(config: dict[str, Any]) -> WeightFormat:
    """Read a `quantization_config`."""
    read, settings = _FORMATS[check_choice("packing_format", config.get("packing_format"), tuple(_FORMATS))]
    check_choice("data_type", config.get("data_type", "int"), ("int",))
    modules = read_section(config, "extra_config")
    # a module of 16 bits is left alone
    if any(read_section(modules, name).get("bits") != 16 for name in modules):
        raise FormatError(f"'extra_config' gives modules bits of their own, {ADVICE}")
    return read({**config, **settings})
