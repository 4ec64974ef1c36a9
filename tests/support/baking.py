"""Tiny models to bake, and what is seen of them before and after."""

import apply_cases
import torch
from command_line import fp8kv
from families import FAMILIES, HYBRIDS, LATENT, save_model, tiny_model
from transformers import AutoModelForCausalLM

from calib.capture.attention import observe_qkv
from calib.rescale.weight_changes import cached_attention
from calib.scales.stats_file import load_scales

OTHERS = {"glm4": {"head_dim": 16, "partial_rotary_factor": 0.5}, "qwen3_next": HYBRIDS["qwen3_next"]}
# what the latent and k_pe of one layer after the other are multiplied by
LATENT_SIZES = ((0.003, 9000.0), (3000.0, 0.002), (0.7, 40.0), (1.3, 0.9))
TOKENS = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(1))


def model_directory(path, model_type, *, dtype=torch.bfloat16, **options):
    model = tiny_model(model_type, **(FAMILIES | OTHERS)[model_type] | options)
    with torch.no_grad():
        for module in cached_attention(model):
            # K and V of any size, and heads and channels that differ
            for child in model.get_submodule(module).children():
                if hasattr(child, "weight") and child.weight.dim() == 2:
                    child.weight.mul_(torch.linspace(-3, 3, child.weight.shape[0]).exp2()[:, None])
    return save_model(model.to(dtype), path)


def latent_directory(path, model_type, *, dtype=torch.bfloat16, **options):
    """A model whose latents and k_pe are far too large or small for FP8."""
    model = tiny_model(model_type, **LATENT[model_type] | options)
    modules = (module for module in model.modules() if hasattr(module, "kv_a_proj_with_mqa"))
    with torch.no_grad():
        for module, (latent, k_pe) in zip(modules, LATENT_SIZES, strict=False):
            module.kv_a_layernorm.weight.mul_(latent)
            for parameter in module.kv_a_proj_with_mqa.parameters():
                parameter[module.kv_lora_rank :].mul_(k_pe)
    return save_model(model.to(dtype), path)


def bake(source, scales, out, *flags):
    return fp8kv("bake", source, "--scales", scales, "-o", out, *flags)


def calibrated(source, out, *flags):
    return apply_cases.calibrated(source, out, "--dtype", "float32", *flags)


def in_float32(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for parameter in model.parameters():
        # kernels may add in another order where memory is aligned otherwise, as in a mapped file
        parameter.data = parameter.data.clone()
    return model


@torch.inference_mode()
def seen(directory):
    model, found = in_float32(directory), {}
    with observe_qkv(model, lambda name, _, k, v: found.__setitem__(name, (k, v))):
        logits = model(TOKENS, use_cache=False).logits
    return logits, found


def seen_amax(directory):
    logits, found = seen(directory)
    return logits, {name: tuple(x.abs().max().item() for x in pair) for name, pair in found.items()}


def scales_of(directory):
    assert apply_cases.report_of(directory)["recipe"]["strategy"] == "attn_head"
    return torch.stack([torch.stack([layer.k, layer.v]) for layer in load_scales(directory).layers.values()])
