"""What AutoRound writes of quantised weights: GPTQ, AWQ, its own layout, and FP8 in blocks.

Runs in an environment that holds auto-round, not ours: `make bench-golden`.
"""

import contextlib
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import quantized
import tiny_llama
import torch
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round.schemes import preset_name_to_scheme
from auto_round.utils import weight_handler
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
from torch import Tensor

GROUP = 32
BLOCK = (128, 128)
# stored zero points are one less than those of the codes, or the same
LINEAR = {"auto_gptq": qlinear_torch_zp.QuantLinear, "auto_round": qlinear_torch.QuantLinear}
CASES: dict[str, tuple[str, int, bool]] = {  # case -> format, bits, symmetric
    "gptq-w4": ("auto_gptq", 4, True),
    "gptq-w4-asym": ("auto_gptq", 4, False),
    "gptq-w8": ("auto_gptq", 8, True),
    "gptq-w8-asym": ("auto_gptq", 8, False),
    "gptq-w3-asym": ("auto_gptq", 3, False),
    "gptq-w2-asym": ("auto_gptq", 2, False),
    "awq-w4": ("auto_awq", 4, True),
    "awq-w4-asym": ("auto_awq", 4, False),
    "auto-round-w4": ("auto_round", 4, True),
    "auto-round-w4-asym": ("auto_round", 4, False),
    "auto-round-w8-asym": ("auto_round", 8, False),
    "fp8-block": ("fp8", 8, True),
}


class WideTorch:
    """torch for code that multiplies in bfloat16 whatever it is given: here in float32."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def main() -> None:
    """Write and keep each, or those that are named."""
    os.environ["AR_ALLOW_W8_ASYM"] = "1"  # which vLLM does not serve
    for case in CASES:
        if case in (sys.argv[1:] or [case]):
            _write(case, *CASES[case])


def _write(case: str, layout: str, bits: int, symmetric: bool) -> None:
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):  # it leaves a work space
        scratch = Path(name)
        blocks = layout == "fp8"
        shape = quantized.BLOCK_SHAPE if blocks else quantized.SHAPE
        model = tiny_llama.make(scratch / "model", **shape)
        weights = {"scheme": "FP8_BLOCK"} if blocks else _integers(bits, symmetric)
        rounding = AutoRound(
            model,
            tiny_llama.tokenizer(),
            iters=0,
            dataset=[row[None] for row in tiny_llama.token_ids()],
            nsamples=tiny_llama.SAMPLES,
            seqlen=tiny_llama.LENGTH,
            batch_size=1,
            **weights,
        )
        rounding.quantize_and_save(str(scratch / "output"), format=layout)
        written = next((scratch / "output").rglob("config.json")).parent
        parts = quantized.attention_parts(written)
        packing = _packing(written, layout)
        decoded = {module: _decode(held, packing, bits) for module, held in parts.items()}
        how = f"auto-round {version('auto-round')}, {packing}, scales in float32"
        quantized.keep(written, "auto-round", case, decoded, how)


def _integers(bits: int, symmetric: bool) -> dict[str, Any]:
    scheme = preset_name_to_scheme(f"W{bits}A16")
    scheme.group_size, scheme.sym = GROUP, symmetric
    return {"scheme": scheme}


def _packing(written: Path, layout: str) -> str:
    """Which code packed them: AutoRound's own format has several."""
    says = json.loads((written / "config.json").read_text())["quantization_config"]
    return str(says.get("packing_format", layout)).removeprefix("auto_round:")


def _decode(parts: dict[str, Tensor], layout: str, bits: int) -> Tensor:
    if layout == "fp8":
        with patch.object(weight_handler, "torch", WideTorch()):
            return weight_handler._dequant_fp8_linear_weight(
                parts["weight"], parts["weight_scale_inv"], BLOCK
            )
    scales = parts["scales"].float()
    if layout == "auto_awq":
        return dequantize_gemm(parts["qweight"], parts["qzeros"], scales, bits, GROUP).t()
    inputs = scales.shape[0] * GROUP
    linear = LINEAR[layout](bits, GROUP, inputs, scales.shape[1], bias=False, g_idx=True)
    for name, tensor in {**parts, "scales": scales}.items():
        setattr(linear, name, tensor)
    return linear(torch.eye(inputs)).t()


if __name__ == "__main__":
    main()
