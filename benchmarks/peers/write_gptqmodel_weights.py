"""What GPTQModel writes: GPTQ in both forms of zero points, with columns in order of activations.

Runs in an environment that holds gptqmodel, not ours: `make bench-golden`.
"""

import contextlib
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import quantized
import tiny_llama
import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from torch import Tensor

GROUP = 32
CASES: dict[str, dict[str, Any]] = {
    "gptq-w4-act-order": {"desc_act": True},
    "gptq-w4-act-order-asym": {"desc_act": True, "sym": False},
    "gptq-w4-v2-asym": {"desc_act": False, "sym": False, "format": "gptq_v2"},
    "gptq-w8-channel": {"desc_act": False, "bits": 8, "group_size": -1, "act_group_aware": False},
    "gptq-w3-act-order": {"desc_act": True, "bits": 3},
    "awq-w4": {"quant_method": "awq", "format": "gemm", "sym": False},
}


def main() -> None:
    """Write and keep each, or those that are named."""
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # it asks itself for two, and has half of the cores
    for case, says in CASES.items():
        if case in (sys.argv[1:] or [case]):
            _write(case, {"bits": 4, "group_size": GROUP, **says})


def _write(case: str, says: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):  # it leaves logs
        scratch = Path(name)
        shape = quantized.WIDE_SHAPE if "awq" in case else quantized.SHAPE
        tiny_llama.make(scratch / "model", **shape)
        config = QuantizeConfig(device="cpu", offload_to_disk=False, **says)
        model = GPTQModel.load(str(scratch / "model"), config, backend=BACKEND.TORCH)
        ids = tiny_llama.token_ids().tolist()
        model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids], batch_size=1)
        output = scratch / "output"
        model.save(str(output))
        code = "dequantize_gemm" if "awq" in case else "dequantize_weight"
        how = f"gptqmodel {version('gptqmodel')}, {code}, scales in float32"
        quantized.keep(output, "gptqmodel", case, _decoded(output), how)


def _decoded(output: Path) -> dict[str, Tensor]:
    if "awq" in (output / "config.json").read_text():
        held = quantized.attention_parts(output)
        return {module: _awq(**parts).t() for module, parts in held.items()}
    loaded = GPTQModel.load(str(output), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16)
    found = {}
    for name, module in loaded.model.named_modules():
        if "self_attn." in name and hasattr(module, "qweight"):
            module.scales = module.scales.float()
            found[name] = module.dequantize_weight().t()
    return found


def _awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    return dequantize_gemm(qweight, qzeros, scales.float(), 4, GROUP)


if __name__ == "__main__":
    main()
