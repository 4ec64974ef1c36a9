"""NVIDIA ModelOpt's checkpoints: FP8, NVFP4, MXFP4 and MXFP8, and several in one model.

Source: `modelopt.torch.export` 0.47, which writes `hf_quant_config.json` and, in another form, a
`quantization_config`.
"""

from dataclasses import replace
from typing import Any

from calib.models.quantized.coded_weight import known, section
from calib.models.quantized.scaled import MXFP4, MXFP8, NVFP4, ByName, Scaled

_SCHEMES = {
    "FP8": Scaled(),
    "FP8_PER_CHANNEL_PER_TOKEN": Scaled((1, None)),
    "fp8_pb_wo": Scaled((128, 128)),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "W4A8_NVFP4_FP8": replace(NVFP4, block=(1, 32)),
    "mxfp4": MXFP4,
    "MXFP8": MXFP8,
}


def read_modelopt(says: dict[str, Any]) -> ByName:
    """Read a `quantization_config`, or what `hf_quant_config.json` holds."""
    says = {**says, **section(says, "quantization")}
    if says.get("quant_algo") != "MIXED_PRECISION":
        return ByName("ModelOpt", _scheme(says))
    layers = section(says, "quantized_layers")
    return ByName("ModelOpt", None, tuple((n, _scheme(section(layers, n))) for n in layers))


def _scheme(says: dict[str, Any]) -> Scaled:
    scheme = _SCHEMES[known("quant_algo", says.get("quant_algo"), _SCHEMES)]
    if scheme.block[0] == 1 and scheme.block[1]:
        known("group_size", says.get("group_size"), (None, scheme.block[1]))
    return scheme
