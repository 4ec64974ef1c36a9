"""Tiny random models of every supported family, built from their configs; no download."""

import copy
import json
from functools import wraps

import torch
import transformers
from realistic import give_realistic_weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.llama.modeling_llama import LlamaAttention

_BASE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
_BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
_BASE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDE = {"head_dim": 24}  # heads wider than hidden_size / num_heads
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_SLIDING_AND_FULL = ["sliding_attention", "sliding_attention", "full_attention"]
_SLIDING = {"sliding_window": 5, "layer_types": _SLIDING_AND_FULL}
_MOSTLY_FULL = ["sliding_attention", "full_attention", "full_attention"]
_MOSTLY_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
FAMILIES: dict[str, dict] = {
    **{name: {} for name in ("llama", "qwen2", "phi3", "gpt_neox", "olmo2", "granite", "starcoder2")},
    **{name: {"sliding_window": 5} for name in ("mistral", "cohere2")},
    "mixtral": {"num_local_experts": 4},
    "qwen3": _WIDE,
    "qwen3_moe": _WIDE | _EXPERTS,
    "gemma2": _WIDE | {"sliding_window": 5},
    "gemma3_text": _WIDE | _SLIDING,
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "sliding_window": 5},
}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION |= {"patch_size": 14, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
# the language models of those that see
_TEXT = {"gemma3": _SLIDING, "llama4": {"intermediate_size_mlp": 96, "num_local_experts": 2}}
_TEXT |= {"mllama": {"head_dim": 16, "cross_attention_layers": [1]}, "paligemma": {"model_type": "gemma"}}
_ROPE = {"head_dim": 16, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 4]}}
_TEXT |= {"qwen2_5_vl": _ROPE, "glm4v": _ROPE, "paddleocr_vl": _ROPE}
_TEXT |= {"qwen3_5": _ROPE | {"layer_types": ["full_attention"] * 3}}
# linear attention or Mamba in all layers but one
_QWEN3_NEXT = _WIDE | _EXPERTS | {"layer_types": _MOSTLY_LINEAR, "shared_expert_intermediate_size": 32}
_QWEN3_NEXT |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
_QWEN3_NEXT |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_JAMBA = {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
HYBRIDS: dict[str, dict] = {"qwen3_next": _QWEN3_NEXT, "jamba": _JAMBA}
# layers that differ in their numbers of KV heads and in their sizes, as published configs say it
_GEMMA4 = {"head_dim": 16, "num_key_value_heads": 4, "global_head_dim": 32, "num_global_key_value_heads": 2}
_GEMMA4 |= {"attention_k_eq_v": True, "sliding_window": 5, "layer_types": _MOSTLY_FULL, "num_experts": 4}
_GEMMA4 |= {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "top_k_experts": 2}
_MIMO = _SLIDING | _ROUTED | _ONE_GROUP  # layers with a window have twice the KV heads, and sinks
_MIMO |= {"head_dim": 24, "v_head_dim": 16, "swa_num_key_value_heads": 4}
UNEVEN = {"gemma4_text": _GEMMA4 | {"moe_intermediate_size": 32}, "mimo_v2_flash": _MIMO}
# attention beside Mamba or a convolution in one layer
_FALCON_H1 = {"head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
PARALLEL = {"falcon_h1": _FALCON_H1 | {"mamba_n_groups": 1, "mamba_chunk_size": 8}}
# K and V that go through a convolution first, whose states a cache holds too
_INKLING = _ROUTED | {"head_dim": 16, "swa_head_dim": 16, "swa_num_attention_heads": 4, "d_rel": 4}
_INKLING |= {"swa_num_key_value_heads": 2, "sliding_window_size": 5, "rel_extent": 16}
CONVOLVED: dict[str, dict] = {
    "zaya": {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "router_hidden_size": 16},
    "inkling_text": _INKLING | {"n_shared_experts": 1, "local_layer_ids": [0, 1]},
}
# a class of its own for the cache
_MINIMAX = {"head_dim": 16, "num_local_experts": 4, "layer_types": _MOSTLY_LINEAR, "block_size": 8}
OWN_CACHE: dict[str, dict] = {"minimax": _MINIMAX}
# one attention module in several layers, each with a cache of its own
_ZAMBA = {"mamba_d_state": 8, "n_mamba_heads": 2, "num_key_value_heads": 4}
_ZAMBA2 = _ZAMBA | {"n_mamba_heads": 8, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 8}
_ZAMBA2 |= {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "use_mem_rope": False}
ONE_MODULE: dict[str, dict] = {
    "zamba": _ZAMBA | {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1},
    "zamba2": _ZAMBA2 | {"num_hidden_layers": 4, "num_mem_blocks": 1},
}
SHARED_KV = {"head_dim": 16, "num_kv_shared_layers": 1, "layer_types": _MOSTLY_FULL, "laurel_rank": 4}
SHARED_KV |= {"activation_sparsity_pattern": [0.0] * 3, "intermediate_size": [96] * 3, "altup_num_inputs": 2}
SHARED_KV |= {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
MLA = _ROUTED | _ONE_GROUP | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
MLA |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_SPARSE = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
_LINEAR_BEFORE = {"linear_num_heads": 2, "linear_head_dim": 16, "num_experts": 4}
_LINEAR_BEFORE |= {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
_LONGCAT = {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2}
# multi-head latent attention; of `_SPARSE` ones an indexer chooses the tokens that are attended to
LATENT: dict[str, dict] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite", "youtu", "axk1"), MLA),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"), MLA | _SPARSE),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), MLA | _LINEAR_BEFORE),
    "longcat_flash": MLA | _LONGCAT | {"zero_expert_num": 2, "head_dim": 8},
}


def built_once(build):
    """Make `build` keep each of its models: who calls gets a copy, and the random state behind it."""
    kept = {}

    @wraps(build)
    def copied(*arguments, **options):
        asked = repr((arguments, sorted(options.items())))
        if asked not in kept:
            kept[asked] = build(*arguments, **options), torch.get_rng_state()
        model, state = kept[asked]
        torch.set_rng_state(state)
        return copy.deepcopy(model)

    return copied


def _built(auto_class, model_type, **options):
    torch.manual_seed(0)
    return give_realistic_weights(auto_class.from_config(AutoConfig.for_model(model_type, **options))).eval()


@built_once
def tiny_model(model_type: str, **options):
    return _built(AutoModelForCausalLM, model_type, **{**_BASE, **options})


@built_once
def mixed_model():
    """Latent attention in all layers but the second, which has K and V per head."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("deepseek_v3", **{**_BASE, **LATENT["deepseek_v3"]})
    model = AutoModelForCausalLM.from_config(config)
    model.model.layers[1].self_attn = LlamaAttention(config, 1)
    return give_realistic_weights(model).eval()


@built_once
def tiny_vision_language_model(family="gemma3", **options):
    """A model with a vision tower whose layers are named like the language model's."""
    text = {**_BASE, **_WIDE, **_TEXT.get(family, {}), **options}
    vision = _VISION | {"num_hidden_layers": 3, "image_size": 28}
    if family == "llama4":
        vision |= {"intermediate_size": 128, "vision_output_dim": 64}
        vision |= {"projector_input_dim": 64, "projector_output_dim": 64}
    if family == "mllama":
        vision |= {"attention_heads": 2, "num_global_layers": 1}
        vision |= {"intermediate_layers_indices": [0], "vision_output_dim": 64}
    configs = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 1}
    return _built(transformers.AutoModelForImageTextToText, family, **configs)


@built_once
def tiny_listening_model(family, **options):
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    audio |= {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    audio |= {"num_mel_bins": 16, "max_source_positions": 100}
    text = _BASE | options
    return _built(AutoModelForMultimodalLM, family, text_config=text, audio_config=audio, audio_token_id=13)


def published_gemma4(directory):
    """A Gemma 4 that sees, saved, with the config fields of the models on the Hub."""
    own, vision = UNEVEN["gemma4_text"], _VISION | {"head_dim": 16, "num_key_value_heads": 2, "patch_size": 4}
    configs = {"text_config": _BASE | own, "vision_config": vision | {"position_embedding_size": 64}}
    save_model(_built(transformers.AutoModelForImageTextToText, "gemma4", **configs), directory)
    text = json.loads((directory / "config.json").read_text())["text_config"]
    del text["per_layer_config"]  # which transformers makes of these
    text |= {key: own[key] for key in ("global_head_dim", "num_global_key_value_heads")}
    edit_json(directory / "config.json", text_config=text)
    return directory


def save_model(model, directory):
    """Save a model of 128 tokens with a tokenizer that knows them as words: w3, w4, ..."""
    model.save_pretrained(directory)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    no = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": token, "special": True, **no} for i, token in enumerate(special.values())]
    vocab = {word: i for i, word in enumerate([*special.values(), *(f"w{i}" for i in range(3, 128))])}
    words = {"type": "WordLevel", "vocab": vocab, "unk_token": "<pad>"}
    tokenizer = {"version": "1.0", "added_tokens": added, "model": words}
    tokenizer |= {"pre_tokenizer": {"type": "WhitespaceSplit"}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def edit_tensors(directory, edit, name="model.safetensors"):
    """Let `edit` change a file's tensors; another directory may have a link to the file as it was."""
    file = directory / name
    edit(tensors := load_file(file))
    file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
