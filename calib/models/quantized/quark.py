"""AMD Quark's checkpoints: FP8 and INT8 with a scale per weight or row, INT4, and MXFP4.

Source: what Quark 0.13 exports for Hugging Face, and vLLM's `quark.py`, which reads it.
"""

from typing import Any

from calib.models.quantized.coded_weight import (
    ADVICE,
    WeightFormatError,
    WeightScheme,
    group_size_of,
    known,
    section,
)
from calib.models.quantized.gptq import Awq
from calib.models.quantized.scaled import FP8, INT8, MXFP4, ByName, Scaled

_SCHEMES = {
    f"{dtype} {qscheme}": Scaled(block, dtype=stored, has_zero_points=None)
    for dtype, stored in (("fp8_e4m3", FP8), ("int8", INT8))
    for qscheme, block in (("per_tensor", (None, None)), ("per_channel", (1, None)))
}
_NAMES = ("weight", "weight_zero_point", "weight_scale")


def read_quark(says: dict[str, Any]) -> ByName:
    """Read a `quantization_config`."""
    export = section(says, "export")
    known("weight_format", export.get("weight_format", "real_quantized"), ("real_quantized",))
    # AWQ's order of integers
    known("pack_method", export.get("pack_method", "reorder"), ("reorder",))
    if says.get("layer_type_quant_config") or says.get("algo_config"):
        # rotations and smoothing among them change what a weight is multiplied with
        raise WeightFormatError(f"layer_type_quant_config or algo_config is set, {ADVICE}")
    layers = section(says, "layer_quant_config")
    by_pattern = tuple((pattern, _scheme(section(layers, pattern))) for pattern in layers)
    return ByName("Quark", _scheme(section(says, "global_quant_config")), by_pattern)


def _scheme(says: dict[str, Any]) -> WeightScheme:
    weight = section(says, "weight")
    name, group_size = f"{weight.get('dtype')} {weight.get('qscheme')}", group_size_of(weight)
    known("is_dynamic", weight.get("is_dynamic", False), (False,))
    if name.endswith("per_channel"):
        known("ch_axis", weight.get("ch_axis"), (0, None))
    if name == "fp4 per_group":
        known("group_size", group_size, (MXFP4.block[1],))
        known("scale_format", weight.get("scale_format"), ("e8m0",))
        return MXFP4
    if name in ("int4 per_group", "uint4 per_group"):
        return Awq(group_size, _NAMES, signed=name.startswith("int4"))
    packed = ("fp4 per_group", "int4 per_group", "uint4 per_group")
    return _SCHEMES[known("weight", name, (*_SCHEMES, *packed))]
