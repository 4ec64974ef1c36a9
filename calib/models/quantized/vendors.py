"""Formats of those who make models or GPUs: DeepSeek's FP8, gpt-oss, NVIDIA ModelOpt and AMD Quark.

Sources: `fp8_cast_bf16.py` of DeepSeek-V3 (a weight is its codes times `weight_scale_inv`), and vLLM's
`fp8.py` for the older form with a `weight_scale`; `convert_moe_packed_tensors` of transformers'
`integrations/mxfp4.py` for the experts of gpt-oss; `modelopt.torch.export` 0.47, which writes
`hf_quant_config.json` and, in another form, a `quantization_config`; the output of Quark 0.13 for Hugging
Face, and vLLM's `quark.py`, which reads it.
"""

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from calib.models.quantized.coded_weight import (
    E8M0,
    FLOATS,
    MXFP4,
    MXFP8,
    NVFP4,
    CodedWeight,
    ModuleTensors,
    Shape,
    Tensors,
    WeightFormat,
    WeightScheme,
    scales_to_float,
    unpack_fp4,
)
from calib.models.quantized.config import ADVICE, FormatError, QuantizationConfig
from calib.models.quantized.packed_integers import AwqScheme

_MODELOPT_SCHEMES = {
    "FP8": WeightScheme(),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightScheme((1, None)),
    "fp8_pb_wo": WeightScheme((128, 128)),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "W4A8_NVFP4_FP8": replace(NVFP4, block=(1, 32)),
    "mxfp4": MXFP4,
    "MXFP8": MXFP8,
}
_QUARK_SCHEMES = {
    f"{name} {qscheme}": WeightScheme(block, dtype=dtype, has_zeros=None)
    for name, dtype in (("fp8_e4m3", "F8_E4M3"), ("int8", "I8"))
    for qscheme, block in (("per_tensor", (None, None)), ("per_channel", (1, None)))
}
_QUARK_GROUPED = ("fp4 per_group", "int4 per_group", "uint4 per_group")


def read_fp8(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config` of FP8 with a scale per tile, or per weight."""
    scale_dtypes = (*FLOATS, "F8_E8M0")
    config.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    if config.get("weight_block_size") is None:
        scheme = WeightScheme(scales=("weight_scale", "weight_scale_inv"), scale_dtypes=scale_dtypes)
    else:
        tile = config.tile("weight_block_size")
        scheme = WeightScheme(tile, scales=("weight_scale_inv",), scale_dtypes=scale_dtypes)
    return WeightFormat("FP8", scheme)


class ExpertsScheme(WeightScheme):
    """Blocks [experts, out, groups, 16] and their scales [experts, out, groups]."""

    def decode(self, shape: Shape, tensors: Tensors, rows: slice) -> Tensor:
        """Decode `rows`, experts [in, out]: [experts, in, out] float32."""
        values = unpack_fp4(tensors["codes"][rows])  # [experts, out, groups, 32]
        return (values * scales_to_float(tensors["scale"][rows]).unsqueeze(-1)).flatten(-2).transpose(1, 2)


class ExpertsFormat(WeightFormat):
    """Modules of experts, which hold several weights each: `X_blocks` and `X_scales` of a weight X."""

    def weights(self, module: ModuleTensors) -> Iterable[CodedWeight]:
        """Yield the fused weights of a module; FormatError for other shapes."""
        for part in sorted(part for part in module.entries if part.endswith("_blocks")):
            weight, codes = part.removesuffix("_blocks"), module.require(part, ("U8",))
            shape = module.entries[part].shape
            if len(shape) != 4 or shape[3] != 16 or 0 in shape:
                raise FormatError(f"'{codes}' is {[*shape]}, {ADVICE}")
            experts, rows, groups = shape[:3]
            parts = {"codes": codes, "scale": module.require(f"{weight}_scales", E8M0, shape[:3])}
            shape = (experts, groups * 32, rows)
            yield CodedWeight(f"{module.name}.{weight}", shape, parts, ExpertsScheme())


def read_gpt_oss(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config` of gpt-oss, which has nothing to choose."""
    return ExpertsFormat("MXFP4", None)


def read_modelopt(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config` of ModelOpt, or the document of `hf_quant_config.json`."""
    config = QuantizationConfig({**config, **config.section("quantization")})
    if config.get("quant_algo") != "MIXED_PRECISION":
        return WeightFormat("ModelOpt", _read_modelopt_scheme(config))
    layers = config.sections("quantized_layers")
    return WeightFormat(
        "ModelOpt", None, tuple((name, _read_modelopt_scheme(layers[name])) for name in layers)
    )


def _read_modelopt_scheme(config: QuantizationConfig) -> WeightScheme:
    scheme = _MODELOPT_SCHEMES[config.choice("quant_algo", _MODELOPT_SCHEMES)]
    if scheme.block[0] == 1 and scheme.block[1]:
        config.choice("group_size", (scheme.block[1],), scheme.block[1])
    return scheme


def read_quark(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config` of Quark; FormatError for settings by layer type or algorithm."""
    export = config.section("export")
    export.choice("weight_format", ("real_quantized",), "real_quantized")
    export.choice("pack_method", ("reorder",), "reorder")  # AWQ's order of integers
    if config.get("layer_type_quant_config") or config.get("algo_config"):
        # rotations and smoothing among them change what a weight is multiplied with
        raise FormatError(f"layer_type_quant_config or algo_config is set, {ADVICE}")
    layers = config.sections("layer_quant_config")
    patterns = tuple((pattern, _read_quark_scheme(layers[pattern])) for pattern in layers)
    return WeightFormat("Quark", _read_quark_scheme(config.section("global_quant_config")), patterns)


def _read_quark_scheme(config: QuantizationConfig) -> WeightScheme:
    weight = config.section("weight")
    group_size = weight.group_size()
    kind = f"{weight.get('dtype')} {weight.get('qscheme')}"
    QuantizationConfig(weight=kind).choice("weight", (*_QUARK_SCHEMES, *_QUARK_GROUPED))
    weight.choice("is_dynamic", (False,), False)
    if kind.endswith("per_channel"):
        weight.choice("ch_axis", (0,), 0)
    if kind == "fp4 per_group":
        weight.choice("group_size", (32,))
        weight.choice("scale_format", ("e8m0",))
        return MXFP4
    if kind in _QUARK_GROUPED:
        return AwqScheme((1, group_size), is_signed=kind.startswith("int4"))
    return _QUARK_SCHEMES[kind]
