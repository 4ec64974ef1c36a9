"""Write small models of many families, from the configs that the engines' classes are built from.

write_models.py families OUT [ARCHITECTURE ...]
    Random weights calibrated in each format: OUT/<architecture>/<format>, or the reason in <format>.refused
write_models.py latents OUT
    A DeepSeek-V2 whose latents FP8 does not hold at 1.0: OUT/source, its stress twin OUT/twin, and of the
    twin OUT/scales and OUT/baked, by fp8kv's own commands
write_models.py clean OUT
    Ten families with realistic weights, each with the scales that CLEAN asks for: OUT/<architecture>/<kind>
write_models.py queries OUT [ARCHITECTURE ...]
    Realistic weights in float32, and each head's measured amax of Q, K and V in measured.json, or why not
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from command_line import calibrate, ran, succeeded
from families import save_model
from realistic import give_realistic_weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from calib.capture.capabilities import RUN
from calib.capture.loop import calibrate as measure
from calib.data import make_batches
from calib.errors import Fp8kvError
from calib.recipe import load_recipe

ARCHITECTURES = Path(__file__).parents[2] / "tools/engine_classes/architectures"
_CAUSAL = "Mixtral Llama Mistral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Gemma Gemma2 Gemma3 Phi3 GptOss Glm4 Granite"
FAMILIES = [f"{name}ForCausalLM" for name in f"{_CAUSAL} Olmo2 Starcoder2 Cohere2 GPTBigCode".split()]
FAMILIES += ["GPT2LMHeadModel", "Llama4ForConditionalGeneration", "LlavaForConditionalGeneration"]
VARIED = ["Mixtral", "Llama", "Mistral", "Qwen2", "Qwen3Moe", "Gemma2", "Phi3", "GptOss", "Granite"]
VARIED += ["Starcoder2"]
CLEAN = {"tensor": [], "modelopt": ["--format", "modelopt"], "queries": ["--targets", "qkv"]}
CLEAN |= {"heads": ["--strategy", "attn_head", "--targets", "qkv"]}  # and `baked`, for FP8
TOKENS = [1, *torch.randint(3, 110, (47,), generator=torch.Generator().manual_seed(5)).tolist()]
RECIPE = load_recipe(None, {"device": "cpu", "targets": "qkv"})
# the classes whose vision towers vLLM names as transformers does
SAME_TOWERS = ("AriaForConditionalGeneration", "InternVLForConditionalGeneration")


def make_model(architecture: str, dtype: torch.dtype) -> torch.nn.Module:
    fields = json.loads((ARCHITECTURES / f"{architecture}.json").read_text())
    del fields["fp8kv_attention"]
    if fields.get("multi_query"):
        fields["num_key_value_heads"] = 1
    text = fields.get("text_config", fields)
    if "intermediate_size_mlp" in text:
        text |= {"intermediate_size_mlp": 512, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    seeing = "ForConditionalGeneration" in architecture
    kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    return kind.from_config(config, dtype=dtype)


def write_family(home: Path) -> None:
    save_model(make_model(home.name, torch.bfloat16), home / "source")
    for name in ("vllm", "modelopt", "sglang"):
        done = calibrate(home / "source", "-o", home / name, "--format", name, "--quiet")
        if done.exit_code:
            (home / f"{name}.refused").write_text(done.stderr)
        print(f"{home.name} {name}: {done.stderr.strip() or 'written'}", flush=True)


def write_clean(home: Path, seed: int) -> None:
    model = give_realistic_weights(make_model(home.name, torch.float32), seed)
    source = save_model(model.bfloat16(), home / "source")
    for kind, flags in CLEAN.items():
        succeeded(calibrate(source, "-o", home / kind, "--quiet", *flags))
    ran("bake", source, "--scales", home / "heads", "--for", "fp8", "-o", home / "baked")


def write_latents(out: Path) -> None:
    """A model whose attention matters, and to whom it attends; its twin, scales and baked twin."""
    source, twin, scales, baked = (out / x for x in ("source", "twin", "scales", "baked"))
    model = make_model("DeepseekV2ForCausalLM", torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(32)
        layer.self_attn.kv_a_proj_with_mqa.weight.mul_(8)
        layer.self_attn.q_b_proj.weight.mul_(8)
    save_model(model, source)
    ran("stress", source, "-o", twin)
    succeeded(calibrate(twin, "-o", scales, "--format", "fp8kv", "--quiet"))
    ran("bake", twin, "--scales", scales, "--for", "fp8", "-o", baked)


def write_measured(home: Path) -> None:
    home.mkdir(parents=True)
    try:
        model = give_realistic_weights(make_model(home.name, torch.float32)).eval()
        layers = measure(model, make_batches([TOKENS], 1, pad_id=0), RECIPE).layers.values()
        amax = {x.layer_idx: {y: getattr(x, y).amax.amax(-1).tolist() for y in "kvq"} for x in layers}
        document = {"tokens": TOKENS, "layers": amax}
        save_model(model, home)
        if home.name not in SAME_TOWERS:
            give_vllms_names(home / "model.safetensors")
    except Fp8kvError as error:
        document = {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 (a config that transformers does not build)
        document = {"not built": f"{type(error).__name__}: {error}"}
    (home / "measured.json").write_text(json.dumps(document))
    print(home.name, document.get("refused") or document.get("not built") or "written", flush=True)


def give_vllms_names(file: Path) -> None:
    """Name the weights of vision towers as vLLM 0.32 does, which transformers no longer does."""
    weights, tower = load_file(file), "vision_tower."
    if any(tower + "embeddings" in name for name in weights):
        renamed = {name.replace(tower, f"{tower}vision_model."): weight for name, weight in weights.items()}
        save_file(renamed, file, {"format": "pt"})


if __name__ == "__main__":
    what, out, *names = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    names = names or (sorted(RUN) if what == "queries" else FAMILIES)
    for home in [out / name for name in names] if what == "queries" else [out]:
        shutil.rmtree(home, ignore_errors=True)
    with torch.no_grad():
        if what == "latents":
            write_latents(out)
        elif what == "clean":
            for seed, name in enumerate(VARIED):
                write_clean(out / f"{name}ForCausalLM", seed)
        else:
            for name in names:
                (write_measured if what == "queries" else write_family)(out / name)
