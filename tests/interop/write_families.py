"""Calibrate a small random model of each family in every format of vLLM and SGLang.

write_families.py OUT [ARCHITECTURE ...]   writes OUT/<architecture>/<format>, or with the reason
                                           OUT/<architecture>/<format>.refused
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from command_line import calibrate
from families import save_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

FORMATS = ("vllm", "modelopt", "sglang")
_CAUSAL = (
    *("Mixtral", "Llama", "Mistral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Gemma", "Gemma2"),
    *("Gemma3", "Phi3", "GptOss", "Glm4", "Granite", "Olmo2", "Starcoder2", "Cohere2"),
    "GPTBigCode",
)
_SEEING = ("Llama4ForConditionalGeneration", "LlavaForConditionalGeneration")
FAMILIES = (*(f"{name}ForCausalLM" for name in _CAUSAL), "GPT2LMHeadModel", *_SEEING)


def write_source(architecture: str, directory: Path) -> None:
    """A random model of the family, as a checkpoint."""
    file = Path(__file__).parents[2] / f"tools/engine_classes/architectures/{architecture}.json"
    fields = json.loads(file.read_text())
    del fields["fp8kv_attention"]
    torch.manual_seed(0)
    if "intermediate_size_mlp" in fields.get("text_config", {}):
        fields["text_config"]["intermediate_size_mlp"] = 512
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    kind = AutoModelForImageTextToText if architecture in _SEEING else AutoModelForCausalLM
    save_model(kind.from_config(config, dtype=torch.bfloat16), directory)


def main() -> None:
    """Write them all."""
    out, families = Path(sys.argv[1]), sys.argv[2:] or FAMILIES
    shutil.rmtree(out, ignore_errors=True)
    for architecture in families:
        home = out / architecture
        write_source(architecture, home / "source")
        for name in FORMATS:
            done = calibrate(home / "source", "-o", home / name, "--format", name, "--quiet")
            if done.exit_code:
                (home / f"{name}.refused").write_text(done.stderr)
            print(f"{architecture} {name}: {done.stderr.strip() or 'written'}", flush=True)


if __name__ == "__main__":
    main()
