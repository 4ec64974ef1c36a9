"""AMD Quark: FP8 and INT8 with a scale per weight or row, INT4, and MXFP4.

Source: the output of Quark 0.13 for Hugging Face, and vLLM's `quark.py`, which reads it.
"""

from typing import Any

from calib.models.quantized.awq import AwqScheme
from calib.models.quantized.coded_weight import FP8, INT8, WeightFormat, WeightScheme
from calib.models.quantized.fp4 import MXFP4
from calib.models.quantized.settings import (
    ADVICE,
    FormatError,
    check_choice,
    read_group_size,
    read_section,
)

_SCHEMES = {
    f"{name} {qscheme}": WeightScheme(block, dtype=dtype, has_zeros=None)
    for name, dtype in (("fp8_e4m3", FP8), ("int8", INT8))
    for qscheme, block in (("per_tensor", (None, None)), ("per_channel", (1, None)))
}
_GROUPED = ("fp4 per_group", "int4 per_group", "uint4 per_group")


def read_quark(config: dict[str, Any]) -> WeightFormat:
    """Read a `quantization_config`."""
    export = read_section(config, "export")
    check_choice("weight_format", export.get("weight_format", "real_quantized"), ("real_quantized",))
    # AWQ's order of integers
    check_choice("pack_method", export.get("pack_method", "reorder"), ("reorder",))
    if config.get("layer_type_quant_config") or config.get("algo_config"):
        # rotations and smoothing among them change what a weight is multiplied with
        raise FormatError(f"layer_type_quant_config or algo_config is set, {ADVICE}")
    layers = read_section(config, "layer_quant_config")
    patterns = tuple((pattern, _read_scheme(read_section(layers, pattern))) for pattern in layers)
    return WeightFormat("Quark", _read_scheme(read_section(config, "global_quant_config")), patterns)


def _read_scheme(config: dict[str, Any]) -> WeightScheme:
    weight = read_section(config, "weight")
    name, group_size = f"{weight.get('dtype')} {weight.get('qscheme')}", read_group_size(weight)
    check_choice("weight", name, (*_SCHEMES, *_GROUPED))
    check_choice("is_dynamic", weight.get("is_dynamic", False), (False,))
    if name.endswith("per_channel"):
        check_choice("ch_axis", weight.get("ch_axis"), (0, None))
    if name == "fp4 per_group":
        check_choice("group_size", group_size, (MXFP4.block[1],))
        check_choice("scale_format", weight.get("scale_format"), ("e8m0",))
        return MXFP4
    if name in _GROUPED:
        return AwqScheme((1, group_size), is_signed=name.startswith("int4"))
    return _SCHEMES[name]
