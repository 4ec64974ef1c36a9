"""What AMD's Quark writes of quantised weights: FP8, INT8, INT4 and MXFP4.

Runs in an environment that holds amd-quark, not ours: `make bench-golden`.
"""

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import quantized
import tiny_llama
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
from quark.torch.quantization.config import config as quark
from transformers import AutoConfig, AutoModelForCausalLM

GROUP = 32


def _cases() -> dict[str, quark.QConfig]:
    still = {"is_dynamic": False}
    rows = {"ch_axis": 0, **still}
    groups = {"ch_axis": 1, "group_size": GROUP, "scale_type": "float", **still}
    specs = {
        "fp8": quark.FP8E4M3PerTensorSpec(observer_method="min_max", **still),
        "fp8-channel": quark.FP8E4M3PerChannelSpec(**rows),
        "int8": quark.Int8PerChannelSpec(symmetric=True, scale_type="float", **rows),
        "int4": quark.Int4PerGroupSpec(symmetric=True, **groups),
        "uint4-asym": quark.Uint4PerGroupSpec(symmetric=False, **groups),
        "mxfp4": quark.OCP_MXFP4Spec(ch_axis=-1, **still),
    }
    done = {}
    for case, spec in specs.items():
        weight = spec.to_quantization_spec()
        inputs = {"input_tensors": weight} if case == "fp8" else {}
        layer = quark.QLayerConfig(weight=weight, **inputs)
        done[case] = quark.QConfig(global_quant_config=layer, exclude=["lm_head"])
    return done


def main() -> None:
    """Write and keep each, or those that are named."""
    for case, config in _cases().items():
        if case in (sys.argv[1:] or [case]):
            _write(case, config)


def _write(case: str, config: quark.QConfig) -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = tiny_llama.make(scratch / "model", **quantized.SHAPE)
        rows = [row[None] for row in tiny_llama.token_ids()]
        quantizer = ModelQuantizer(config)
        done = quantizer.freeze(quantizer.quantize_model(model, rows))
        output = scratch / "output"
        export_safetensors(done, output, custom_mode="quark", weight_format="real_quantized")
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(output)).float()
        loaded = import_model_from_safetensors(empty, str(output))
        weights = {
            module: part._get_qweight(part.weight)
            for module, part in loaded.named_modules()
            if isinstance(part, QParamsLinear) and "self_attn" in module
        }
        how = f"amd-quark {version('amd-quark')}, import_model_from_safetensors, in float32"
        quantized.keep(output, "amd-quark", case, weights, how)


if __name__ == "__main__":
    main()
