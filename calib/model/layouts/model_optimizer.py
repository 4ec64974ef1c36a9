"""NVIDIA ModelOpt's checkpoints: FP8, NVFP4, MXFP4 and MXFP8, and several in one model.

Source: `modelopt.torch.export` 0.47, which writes `hf_quant_config.json` and, in another form, a
`quantization_config`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from calib.model.layouts.coded import CodedWeight, LayoutError, Module, section, setting
from calib.model.layouts.scaled import (
    E8M0,
    FP8,
    MXFP4_GROUP,
    NVFP4_GROUP,
    fp4_weight,
    grouped_weight,
    scaled_weight,
)

_GROUPS = {  # of the algorithms with a scale per group: their size
    "NVFP4": NVFP4_GROUP,
    "W4A16_NVFP4": NVFP4_GROUP,
    "W4A8_NVFP4_FP8": 32,
    "mxfp4": MXFP4_GROUP,
    "MXFP8": MXFP4_GROUP,
}
_BLOCKS = {  # of those without
    "FP8": (None, None),
    "FP8_PER_CHANNEL_PER_TOKEN": (1, None),
    "fp8_pb_wo": (128, 128),
}
_OF_ACTIVATIONS = ("input_scale",)


@dataclass(frozen=True)
class ModelOptimizer:
    """`weight` FP8 or packed FP4, `weight_scale`, and for FP4 `weight_scale_2` of the whole."""

    algorithm: str | None  # of every module; None: each has its own
    by_module: tuple[tuple[str, str], ...] = ()

    label = "ModelOpt"

    @classmethod
    def read(cls, says: dict[str, Any]) -> "ModelOptimizer":
        """Read a `quantization_config`, or what `hf_quant_config.json` holds."""
        says = {**says, **section(says, "quantization")}
        if says.get("quant_algo") == "MIXED_PRECISION":
            layers = section(says, "quantized_layers")
            return cls(None, tuple((name, _algorithm(section(layers, name))) for name in layers))
        return cls(_algorithm(says))

    def weights(self, module: Module) -> Iterable[CodedWeight]:
        """The weight of a module whose `weight` is FP8 or bytes."""
        weight = module.entries.get("weight")
        if weight is None or weight.dtype not in (*FP8, "U8"):
            return
        algorithm = self.algorithm or dict(self.by_module).get(module.name)
        if algorithm is None:
            raise LayoutError(f"'{module.name}' holds codes, and quantized_layers does not name it")
        yield _weight(module, algorithm)


def _weight(module: Module, algorithm: str) -> CodedWeight:
    if algorithm in _BLOCKS:
        return scaled_weight(module, _BLOCKS[algorithm], also=_OF_ACTIVATIONS)
    group = _GROUPS[algorithm]
    if algorithm == "MXFP8":
        return grouped_weight(module, group, scale_dtypes=E8M0, also=_OF_ACTIVATIONS)
    is_mx = algorithm == "mxfp4"
    return fp4_weight(
        module,
        group,
        codes="weight",
        scale_dtypes=E8M0 if is_mx else FP8,
        second=None if is_mx else "weight_scale_2",
        also=_OF_ACTIVATIONS,
    )


def _algorithm(says: dict[str, Any]) -> str:
    algorithm = setting(says, "quant_algo", (*_GROUPS, *_BLOCKS), None)
    if algorithm in _GROUPS:
        setting(says, "group_size", (None, _GROUPS[algorithm]), None)
    return str(algorithm)
