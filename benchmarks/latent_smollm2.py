"""SmolLM2 rewritten as a DeepSeek-V3 model: a real text model whose cache is latent.

It computes the same function, in transformers alone: vLLM 0.32 and SGLang 0.5.23 make any rope of
DeepSeek-V3 yarn, and give `kv_a_layernorm` another eps. The latent is the layer's input before
`input_layernorm`'s weight: its RMS is 1. `k_pe` is the keys of all KV heads, rotated. The weights
fit float32 and bfloat16; float16 has too small a range.
"""

import argparse
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from calib.errors import InputError
from calib.files.atomic import atomic_directory, save_tensors
from calib.files.model_directory import ModelDirectory
from calib.files.names import SINGLE_FILE
from calib.formats.directory import copy_small_files
from calib.models.sources import find_model

MODEL = "builtin:smollm2"
LENGTHS = (64, 512, 2000)
NEW_TOKENS = 16
# Largest difference of logits, over the largest logit. SmolLM2's own two ways of attention, eager
# and SDPA, differ by 1.8e-6 on 2,000 tokens; 1e-5 leaves room for rounding in another order. With
# kv_a_layernorm at its natural size it is 2e-4, with a wrong arrangement over 0.1.
BOUND = 1e-5
# qk_head_dim over SmolLM2's: the softmax scale becomes exactly half, so Q is doubled
_WIDER = 4
# so small that its square vanishes beside the eps of kv_a_layernorm, which then is a constant
# factor. At its natural size the norm would divide a second time, by sqrt(m / (m + eps)) for a
# hidden state of mean square m: 7e-4 off on the embeddings.
_TINY = 2.0**-24
_KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "max_position_embeddings", "rms_norm_eps", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
)


def main() -> None:
    """Write the model, compare it with its source, print; leave nothing that differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=MODEL)
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"'{args.out}' exists; give another directory")
    try:
        found = write_latent_model(find_model(args.model), args.out)
    except InputError as error:
        sys.exit(str(error))
    for length, difference in found["logits"].items():
        print(f"{length} tokens: logits within {difference:.2g} of the largest")
    print(f"{NEW_TOKENS} greedy tokens agree")


def write_latent_model(checkpoint: ModelDirectory, out: Path) -> dict[str, Any]:
    """Write the latent model of a Llama to `out` and return how near it is; InputError if not."""
    config = LlamaConfig.from_pretrained(checkpoint.path)
    _check(config)
    with atomic_directory(out) as scratch:
        copy_small_files(checkpoint, scratch)
        latent_config(config).save_pretrained(scratch)
        tensors = latent_weights(_weights(checkpoint), config)
        save_tensors(tensors, scratch / SINGLE_FILE, {"format": "pt"})
        found = compare(checkpoint.path, scratch)
        is_near = all(difference <= BOUND for difference in found["logits"].values())  # NaN is not
        if not (is_near and found["same_text"]):
            raise InputError(f"the latent model is not the same function: {found}; allowed {BOUND}")
    return found


def _check(config: LlamaConfig) -> None:
    rope = config.rope_parameters["rope_type"]
    given = (config.model_type, rope, config.attention_bias or config.mlp_bias)
    if given != ("llama", "default", False) or config.num_key_value_heads >= _WIDER:
        raise InputError(
            f"model_type, rope_type and biases are {given}, KV heads {config.num_key_value_heads}; "
            f"give a Llama with plain rope, no bias and fewer than {_WIDER} KV heads"
        )


def _weights(checkpoint: ModelDirectory) -> dict[str, Tensor]:
    found = {}
    for shard in checkpoint.shards:
        with safe_open(checkpoint.path / shard, framework="pt") as file:
            found |= {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    return found


# ---- the config ----


def latent_config(config: LlamaConfig) -> DeepseekV3Config:
    """Config of the latent model of a Llama: every layer dense, one frequency per rotated pair."""
    rope_dim = config.num_key_value_heads * config.head_dim
    return DeepseekV3Config(
        **{name: getattr(config, name) for name in _KEPT},
        architectures=["DeepseekV3ForCausalLM"],
        dtype="float32",
        first_k_dense_replace=config.num_hidden_layers,
        num_mtp_layers=0,
        num_key_value_heads=config.num_attention_heads,
        q_lora_rank=None,
        kv_lora_rank=config.hidden_size,
        qk_rope_head_dim=rope_dim,
        qk_nope_head_dim=_WIDER * config.head_dim - rope_dim,
        v_head_dim=config.head_dim,
        rope_interleave=False,
        rope_parameters=_rope(config),
    )


def _rope(config: LlamaConfig) -> dict[str, Any]:
    """longrope with base 1, which divides 1 by a factor per pair: Llama's base ** exponent."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    divisors = config.rope_parameters["rope_theta"] ** exponents
    if not torch.equal(1.0 / divisors, LlamaRotaryEmbedding(config).inv_freq):
        raise InputError("transformers computes Llama's frequencies in another way than this does")
    factors = divisors.tolist() * config.num_key_value_heads
    return {
        "rope_type": "longrope",
        "rope_theta": 1.0,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
        "short_factor": factors,
        "long_factor": factors,
    }


# ---- the weights ----


def latent_weights(weights: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Tensors of the latent model from those of the Llama, float32."""
    found = {name: tensor for name, tensor in weights.items() if _stays(name)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        norm = weights[f"{prefix}input_layernorm.weight"]
        if not norm.all():
            raise InputError(f"{prefix}input_layernorm.weight has zeros, which nothing undoes")
        q, k, v = (weights[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv")
        latent_rows = torch.diag(_TINY / norm)
        attention = {
            "q_proj": query_rows(q, config),
            "kv_a_proj_with_mqa": torch.cat((latent_rows, key_rows(k, config))),
            "kv_a_layernorm": latent_norm(config.hidden_size),
            "kv_b_proj": value_rows(v * norm, config),
        }
        found |= {f"{prefix}self_attn.{x}.weight": each for x, each in attention.items()}
    return found


def _stays(name: str) -> bool:
    return not name.endswith(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"))


def latent_norm(size: int) -> Tensor:
    """Weight of `kv_a_layernorm` that takes its constant factor and `_TINY` back, [size]."""
    return 1 / DeepseekV3RMSNorm(size)(torch.full((size,), _TINY)).detach()


def query_rows(q: Tensor, config: LlamaConfig) -> Tensor:
    """Rows of each query head, doubled, where its KV head's are in `k_pe`; zeros elsewhere.

    [heads * head_dim, hidden] to [heads * (nope + rope), hidden].
    """
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, q.shape[1]
    rope = q.new_zeros(heads, 2, groups, config.head_dim // 2, size)
    of_head = torch.arange(heads) // (heads // groups)
    rope[torch.arange(heads), :, of_head] = 2 * q.view(heads, 2, -1, size)
    nope = q.new_zeros(heads, (_WIDER - groups) * config.head_dim, size)
    return torch.cat((nope, rope.view(heads, -1, size)), dim=1).flatten(0, 1)


def key_rows(k: Tensor, config: LlamaConfig) -> Tensor:
    """Rows of all KV heads, the first halves before the second ones: those are rotated together.

    [KV heads * head_dim, hidden] before and after.
    """
    return k.view(config.num_key_value_heads, 2, -1, k.shape[1]).transpose(0, 1).reshape(k.shape)


def value_rows(v: Tensor, config: LlamaConfig) -> Tensor:
    """Zeros for K and the rows of its KV head's V, for each query head.

    [KV heads * head_dim, latent] to [heads * (nope + head_dim), latent].
    """
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    values = v.view(groups, -1, v.shape[1]).repeat_interleave(heads // groups, dim=0)
    nope = v.new_zeros(heads, (_WIDER - groups) * config.head_dim, v.shape[1])
    return torch.cat((nope, values), dim=1).flatten(0, 1)


# ---- the proof ----


@torch.inference_mode()
def compare(source: Path, latent: Path) -> dict[str, Any]:
    """Largest difference of logits over the largest logit, by tokens; whether greedy text agrees.

    Both models run in float32 on Python's language reference.
    """
    text = "\n\n".join(pydoc_data.topics.topics.values())
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, : max(LENGTHS)]
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (source, latent)
    ]
    found = {}
    for length in LENGTHS:
        expected, logits = (model(tokens[:, :length]).logits for model in models)
        found[length] = ((logits - expected).abs().max() / expected.abs().max()).item()
    flags: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    texts = [model.generate(tokens[:, : LENGTHS[0]], **flags) for model in models]
    return {"logits": found, "same_text": torch.equal(*texts)}


if __name__ == "__main__":
    main()
