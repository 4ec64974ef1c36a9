"""AMD Quark's checkpoints: FP8 and INT8 with a scale per weight or row, INT4, and MXFP4.

Source: what Quark 0.13 exports for Hugging Face, and vLLM's `quark.py`, which reads it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from calib.model.layouts.awq import awq_weight
from calib.model.layouts.coded import (
    ADVICE,
    CodedWeight,
    LayoutError,
    Module,
    group_size_of,
    section,
    setting,
)
from calib.model.layouts.scaled import E8M0, FP8, INT8, MXFP4_GROUP, fp4_weight, scaled_weight

_OF_ACTIVATIONS = ("input_scale", "output_scale")
_SCHEMES = (
    *("fp8_e4m3 per_tensor", "fp8_e4m3 per_channel", "fp4 per_group"),
    *("int8 per_tensor", "int8 per_channel", "int4 per_group", "uint4 per_group"),
)
_CODES = (*FP8, *INT8, "U8", "I32")
# in AWQ's order, which Quark calls `reorder`
_PACKED = ("weight", "weight_zero_point", "weight_scale")


@dataclass(frozen=True)
class Quark:
    """`weight` FP8 or packed FP4, and `weight_scale`."""

    scheme: "_Scheme"  # of the modules that no pattern names
    by_pattern: tuple[tuple[str, "_Scheme"], ...]

    label = "Quark"

    @classmethod
    def read(cls, says: dict[str, Any]) -> "Quark":
        """Read a `quantization_config`."""
        export = section(says, "export")
        setting(export, "weight_format", ("real_quantized",), "real_quantized")
        setting(export, "pack_method", ("reorder",), "reorder")
        if says.get("layer_type_quant_config") or says.get("algo_config"):
            # rotations and smoothing among them change what a weight is multiplied with
            raise LayoutError(f"layer_type_quant_config or algo_config is set, {ADVICE}")
        layers = section(says, "layer_quant_config")
        found = tuple((pattern, _scheme(section(layers, pattern))) for pattern in layers)
        return cls(_scheme(section(says, "global_quant_config")), found)

    def weights(self, module: Module) -> Iterable[CodedWeight]:
        """The weight of a module whose `weight` is FP8, integers, or bytes of FP4."""
        weight = module.entries.get("weight")
        if weight is None or weight.dtype not in _CODES:
            return
        named = (scheme for glob, scheme in self.by_pattern if fnmatchcase(module.name, glob))
        scheme = next(named, self.scheme)
        yield _weight(module, scheme)


# its name, and the size of a group
_Scheme = tuple[str, int | None]


def _weight(module: Module, scheme: _Scheme) -> CodedWeight:
    name, group_size = scheme
    if name == "fp4 per_group":
        return fp4_weight(
            module, MXFP4_GROUP, codes="weight", scale_dtypes=E8M0, also=_OF_ACTIVATIONS
        )
    if name.endswith("per_group"):
        return awq_weight(module, group_size, _PACKED, signed=name.startswith("int4"))
    return scaled_weight(
        module,
        (1, None) if name.endswith("per_channel") else (None, None),
        codes=INT8 if name.startswith("int8") else FP8,
        zero_point="weight_zero_point" if "weight_zero_point" in module.entries else None,
        also=_OF_ACTIVATIONS,
    )


def _scheme(says: dict[str, Any]) -> _Scheme:
    weight = section(says, "weight")
    name = f"{weight.get('dtype')} {weight.get('qscheme')}"
    setting({"weight": name}, "weight", _SCHEMES, None)
    setting(weight, "is_dynamic", (False,), False)
    if name == "fp4 per_group":
        setting(weight, "group_size", (MXFP4_GROUP,), None)
        setting(weight, "scale_format", ("e8m0",), None)
    if name.endswith("per_channel"):
        setting(weight, "ch_axis", (0, None), None)
    return name, group_size_of(weight)
