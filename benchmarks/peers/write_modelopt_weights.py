"""What ModelOpt writes of quantised weights: FP8, INT8, INT4 AWQ, FP4 and mixtures.

Runs in an environment that holds nvidia-modelopt, not ours: `make bench-golden`.
"""

import copy
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import quantized
import tiny_llama
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.model_config import QUANTIZATION_INT8_SQ
from modelopt.torch.export.quant_utils import from_quantized_weight, pack_int4_in_uint8
from modelopt.torch.quantization.qtensor import (
    FP8QTensor,
    MXFP4QTensor,
    MXFP8QTensor,
    NVFP4QTensor,
)
from torch import Tensor

GROUP = 32
Config = dict[str, Any]
CASES: dict[str, Config] = {
    "fp8": mtq.FP8_DEFAULT_CFG,
    "fp8-channel": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "fp8-block": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
    "nvfp4-weight-only": mtq.W4A16_NVFP4_CFG,
    "nvfp4-fp8": mtq.W4A8_NVFP4_FP8_CFG,
    "mxfp4": mtq.MXFP4_DEFAULT_CFG,
    "mxfp8": mtq.MXFP8_DEFAULT_CFG,
    "int8-smoothquant": mtq.INT8_SMOOTHQUANT_CFG,
    "int4-awq": mtq.INT4_AWQ_CFG,
    "w4a8-awq": mtq.W4A8_AWQ_BETA_CFG,
}


def main() -> None:
    """Write and keep each, or those that are named."""
    cases = {**CASES, "mixed": _mixed()}
    for case, config in cases.items():
        if case in (sys.argv[1:] or [case]):
            _write(case, _small_groups(config))


def _mixed() -> Config:
    """FP8 for attention, FP4 for the rest, and the second layer's K left alone."""
    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    for kind in ("weight", "input"):
        fp8 = {"num_bits": (4, 3), "axis": None}
        name = f"*self_attn.*{kind}_quantizer"
        config["quant_cfg"].append({"quantizer_name": name, "cfg": fp8})
    config["quant_cfg"].append({"quantizer_name": "*layers.1.self_attn.k_proj*", "enable": False})
    return config


def _small_groups(config: Config) -> Config:
    """Integers in groups of 32, not 128, as the model is small."""
    config = copy.deepcopy(config)
    for entry in config["quant_cfg"]:
        held = entry.get("cfg") or {}
        for part in held if isinstance(held, list) else [held]:
            if part.get("num_bits") == 4:
                part["block_sizes"][-1] = GROUP
    return config


def _write(case: str, config: Config) -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        shape = quantized.BLOCK_SHAPE if case == "fp8-block" else quantized.SHAPE
        model = tiny_llama.make(scratch / "model", **shape)
        mtq.quantize(model, config, _read_all)
        output = scratch / "output"
        export_hf_checkpoint(model, export_dir=output)
        parts = quantized.attention_parts(output)
        weights = {module: _logical(held) for module, held in parts.items()}
        code = "the inverse of pack_int4_in_uint8" if "awq" in case else "its QTensors"
        how = f"modelopt {version('nvidia-modelopt')}, {code}, in float32"
        if any("pre_quant_scale" in held for held in parts.values()):
            how += ", times pre_quant_scale, which ModelOpt multiplies the input by"
        quantized.keep(output, "nvidia-modelopt", case, weights, how)


def _logical(parts: dict[str, Tensor]) -> Tensor:
    weight = _decode(parts)
    if "pre_quant_scale" in parts:
        weight = weight * parts["pre_quant_scale"].float()
    return weight


def _decode(parts: dict[str, Tensor]) -> Tensor:
    codes, scale = parts["weight"], parts.get("weight_scale")
    if scale is None:
        return codes.float()
    if codes.dtype == torch.int8:
        return from_quantized_weight(codes, scale, QUANTIZATION_INT8_SQ, torch.float32)
    if codes.dtype == torch.float8_e4m3fn:
        return _fp8(codes, scale)
    if codes.shape[1] == scale.shape[1] * GROUP:  # one byte is two outputs, not two inputs
        return _int4(codes, scale.float())
    shape = torch.Size([codes.shape[0], 2 * codes.shape[1]])
    says = {"scale": scale, "block_sizes": {-1: shape[1] // scale.shape[1]}}
    if scale.dtype == torch.uint8:
        return MXFP4QTensor(shape, torch.float32, codes).dequantize(**says)
    tensor = NVFP4QTensor(shape, torch.float32, codes)
    return tensor.dequantize(double_scale=parts["weight_scale_2"], **says)


def _fp8(codes: Tensor, scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:
        return MXFP8QTensor(codes.shape, torch.float32, codes).dequantize(scale=scale)
    tensor = FP8QTensor(codes.shape, torch.float32, codes)
    if scale.dim() == 4:  # blocks of rows, 1, blocks of columns, 1
        return tensor.dequantize(scale=scale[:, 0, :, 0], block_sizes={-1: 128, -2: 128})
    return tensor.dequantize(scale=scale if scale.dim() == 0 else scale[:, None])


def _int4(codes: Tensor, scale: Tensor) -> Tensor:
    """ModelOpt has no code for it: this is the inverse of its packing, which is checked."""
    pairs = torch.stack([codes & 15, codes >> 4], 1).flatten(0, 1).to(torch.int32)
    signed = torch.where(pairs > 7, pairs - 16, pairs)
    weight = signed * scale.repeat_interleave(GROUP, 1)
    assert torch.equal(pack_int4_in_uint8(weight, scale, GROUP), codes)
    return weight


def _read_all(model: Any) -> None:
    for row in tiny_llama.token_ids():
        model(row[None])


if __name__ == "__main__":
    main()
