"""AMD Quark's checkpoints: FP8 with a scale per weight or row, and MXFP4.

Source: the `quantization_config` and tensors that Quark 0.8 to 0.10 exports for Hugging Face, and
vLLM's `quark.py`, which reads them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from calib.model.layouts.coded import ADVICE, CodedWeight, LayoutError, Module, section, setting
from calib.model.layouts.scaled import E8M0, FP8, MXFP4_GROUP, fp4_weight, scaled_weight

_OF_ACTIVATIONS = ("input_scale", "output_scale")
_SCHEMES = ("fp8_e4m3 per_tensor", "fp8_e4m3 per_channel", "fp4 per_group")


@dataclass(frozen=True)
class Quark:
    """`weight` FP8 or packed FP4, and `weight_scale`."""

    scheme: str  # of the modules that no pattern names
    by_pattern: tuple[tuple[str, str], ...]

    label = "Quark"

    @classmethod
    def read(cls, says: dict[str, Any]) -> "Quark":
        """Read a `quantization_config`."""
        export = section(says, "export")
        setting(export, "weight_format", ("real_quantized",), "real_quantized")
        if says.get("layer_type_quant_config") or says.get("algo_config"):
            # rotations and smoothing among them change what a weight is multiplied with
            raise LayoutError(f"layer_type_quant_config or algo_config is set, {ADVICE}")
        layers = section(says, "layer_quant_config")
        found = tuple((pattern, _scheme(section(layers, pattern))) for pattern in layers)
        return cls(_scheme(section(says, "global_quant_config")), found)

    def weights(self, module: Module) -> Iterable[CodedWeight]:
        """The weight of a module whose `weight` is FP8 or bytes."""
        weight = module.entries.get("weight")
        if weight is None or weight.dtype not in (*FP8, "U8"):
            return
        named = (scheme for glob, scheme in self.by_pattern if fnmatchcase(module.name, glob))
        scheme = next(named, self.scheme)
        if scheme.startswith("fp4"):
            yield fp4_weight(
                module, MXFP4_GROUP, codes="weight", scale_dtypes=E8M0, also=_OF_ACTIVATIONS
            )
        else:
            block = (1, None) if scheme.endswith("per_channel") else (None, None)
            yield scaled_weight(module, block, also=_OF_ACTIVATIONS)


def _scheme(says: dict[str, Any]) -> str:
    weight = section(says, "weight")
    scheme = f"{weight.get('dtype')} {weight.get('qscheme')}"
    setting({"weight": scheme}, "weight", _SCHEMES, None)
    setting(weight, "is_dynamic", (False,), False)
    if scheme.startswith("fp4"):
        setting(weight, "group_size", (MXFP4_GROUP,), None)
        setting(weight, "scale_format", ("e8m0",), None)
    if scheme.endswith("per_channel"):
        setting(weight, "ch_axis", (0, None), None)
    return scheme
