"""Block FP8 as transformers quantises it, and MXFP4 as gpt-oss stores it, decoded by transformers.

transformers quantises on a GPU alone: here its operation for one weight is called (`make bench-golden`).
"""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import quantized
import tiny_llama
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import FineGrainedFP8Config, GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

BLOCK = (32, 32)
HOW = "transformers, its {} in float32"


def main() -> None:
    """Write and keep each."""
    _block_fp8("fp8-block", FineGrainedFP8Config(weight_block_size=BLOCK))
    _block_fp8("fp8-block-ue8m0", FineGrainedFP8Config(weight_block_size=BLOCK, scale_fmt="ue8m0"))
    _gpt_oss()


def _block_fp8(case: str, config: FineGrainedFP8Config) -> None:
    quantizer = SimpleNamespace(quantization_config=config)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tiny_llama.make(directory, **quantized.SHAPE)
        stored: dict[str, Tensor] = {}
        for key, tensor in load_file(directory / "model.safetensors").items():
            is_code = key.endswith("_proj.weight")
            stored |= Fp8Quantize(quantizer).convert({key: tensor}) if is_code else {key: tensor}
        _rewrite(directory, stored, config.to_dict())
        weights = {
            module: Fp8Dequantize(quantizer)._dequantize_one(
                parts["weight"], parts["weight_scale_inv"], torch.float32
            )
            for module, parts in quantized.attention_parts(directory).items()
        }
        quantized.keep(directory, "transformers", case, weights, HOW.format("Fp8Dequantize"))


def _gpt_oss() -> None:
    """Draw the experts' codes at random: transformers' packing needs a kernel from the Hub."""
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=len(tiny_llama.WORDS),
        max_position_embeddings=256,
        sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
        stored, experts = {}, {}
        for key, tensor in load_file(directory / "model.safetensors").items():
            if key.endswith(("gate_up_proj", "down_proj")):
                codes = _random_codes(tensor)
                stored |= {f"{key}_blocks": codes[0], f"{key}_scales": codes[1]}
                experts[key] = convert_moe_packed_tensors(*codes, dtype=torch.float32)
                assert experts[key].shape == tensor.shape
            else:
                stored[key] = tensor
        _rewrite(directory, stored, Mxfp4Config().to_dict())
        how = HOW.format("convert_moe_packed_tensors")
        quantized.keep(directory, "transformers", "mxfp4-gpt-oss", {}, how, experts)


def _random_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of experts' weights [experts, inputs, outputs]."""
    experts, inputs, outputs = weight.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8)


def _rewrite(directory: Path, tensors: dict[str, Tensor], quantization: dict[str, object]) -> None:
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": quantization}
    file.write_text(json.dumps(config, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
