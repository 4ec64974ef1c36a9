"""NVIDIA ModelOpt: FP8, NVFP4, MXFP4 and MXFP8, and several in one model.

Source: `modelopt.torch.export` 0.47, which writes `hf_quant_config.json` and, in another form, a
`quantization_config`.
"""

from dataclasses import replace

from calib.models.quantized.coded_weight import WeightFormat, WeightScheme
from calib.models.quantized.config import QuantizationConfig
from calib.models.quantized.fp4 import MXFP4, NVFP4
from calib.models.quantized.fp8 import MXFP8

_SCHEMES = {
    "FP8": WeightScheme(),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightScheme((1, None)),
    "fp8_pb_wo": WeightScheme((128, 128)),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "W4A8_NVFP4_FP8": replace(NVFP4, block=(1, 32)),
    "mxfp4": MXFP4,
    "MXFP8": MXFP8,
}


def read_modelopt(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config`, or the document of `hf_quant_config.json`."""
    config = QuantizationConfig({**config, **config.section("quantization")})
    if config.get("quant_algo") != "MIXED_PRECISION":
        return WeightFormat("ModelOpt", _read_scheme(config))
    layers = config.sections("quantized_layers")
    return WeightFormat("ModelOpt", None, tuple((name, _read_scheme(layers[name])) for name in layers))


def _read_scheme(config: QuantizationConfig) -> WeightScheme:
    scheme = _SCHEMES[config.choice("quant_algo", _SCHEMES)]
    if scheme.block[0] == 1 and scheme.block[1]:
        config.choice("group_size", (scheme.block[1],), scheme.block[1])
    return scheme
