"""AMD Quark: FP8 and INT8 with a scale per weight or row, INT4, and MXFP4.

Source: the output of Quark 0.13 for Hugging Face, and vLLM's `quark.py`, which reads it.
"""

from calib.models.quantized.awq import AwqScheme
from calib.models.quantized.coded_weight import WeightFormat, WeightScheme
from calib.models.quantized.config import ADVICE, FormatError, QuantizationConfig
from calib.models.quantized.fp4 import MXFP4

_SCHEMES = {
    f"{name} {qscheme}": WeightScheme(block, dtype=dtype, has_zeros=None)
    for name, dtype in (("fp8_e4m3", "F8_E4M3"), ("int8", "I8"))
    for qscheme, block in (("per_tensor", (None, None)), ("per_channel", (1, None)))
}
_GROUPED = ("fp4 per_group", "int4 per_group", "uint4 per_group")


def read_quark(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config`."""
    export = config.section("export")
    export.choice("weight_format", ("real_quantized",), "real_quantized")
    export.choice("pack_method", ("reorder",), "reorder")  # AWQ's order of integers
    if config.get("layer_type_quant_config") or config.get("algo_config"):
        # rotations and smoothing among them change what a weight is multiplied with
        raise FormatError(f"layer_type_quant_config or algo_config is set, {ADVICE}")
    layers = config.sections("layer_quant_config")
    patterns = tuple((pattern, _read_scheme(layers[pattern])) for pattern in layers)
    return WeightFormat("Quark", _read_scheme(config.section("global_quant_config")), patterns)


def _read_scheme(config: QuantizationConfig) -> WeightScheme:
    weight = config.section("weight")
    group_size = weight.group_size()
    kind = f"{weight.get('dtype')} {weight.get('qscheme')}"
    QuantizationConfig(weight=kind).choice("weight", (*_SCHEMES, *_GROUPED))
    weight.choice("is_dynamic", (False,), False)
    if kind.endswith("per_channel"):
        weight.choice("ch_axis", (0,), 0)
    if kind == "fp4 per_group":
        weight.choice("group_size", (32,))
        weight.choice("scale_format", ("e8m0",))
        return MXFP4
    if kind in _GROUPED:
        return AwqScheme((1, group_size), is_signed=kind.startswith("int4"))
    return _SCHEMES[kind]
