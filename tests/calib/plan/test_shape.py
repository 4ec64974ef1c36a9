"""A model's cost from its config: published sizes, and what torch counts on the model itself."""

import json
from pathlib import Path

import pytest
import torch
from command_line import fp8kv, one_line_error
from families import FAMILIES, HYBRIDS, LATENT, SHARED_KV, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from calib.capture.attention import map_attention
from calib.errors import InputError
from calib.plan.shape import attention_heads, model_shape

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"


@pytest.mark.parametrize(
    ("name", "parameters"),
    # the models' cards: 8.03 B, 70.6 B, 406 B
    [("8b", 8.03e9), ("70b", 70.55e9), ("405b", 405.85e9)],
)
def test_published_sizes_come_out(name, parameters):
    shape = model_shape(str(CONFIGS / f"llama-3.1-{name}.json"))
    assert shape.parameters == pytest.approx(parameters, rel=0.001)
    assert shape.weight_bytes == 2 * shape.parameters


def test_the_cache_of_llama_8b_takes_128_kib_per_token_in_16_bits():
    shape = model_shape(str(CONFIGS / "llama-3.1-8b.json"))
    assert 2 * shape.cached_values == 32 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("model", "heads"),
    [(str(CONFIGS / "llama-3.1-8b.json"), (32, 8, 128)), ("builtin:smollm2", (9, 3, 64))],
)
def test_heads_of_a_config_and_of_the_bundled_model(model, heads):
    assert attention_heads(model) == heads


def shape_of(model, directory):
    document = json.loads(model.config.to_json_string(use_diff=False))
    document["architectures"] = ["XForCausalLM"]
    (directory / "config.json").write_text(json.dumps(document))
    return model_shape(str(directory))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_flops_are_those_that_torch_counts(family, tmp_path):
    model = tiny_model(family).eval()
    model.set_attn_implementation("eager")
    shape = shape_of(model, tmp_path)
    tokens = torch.arange(16)[None]
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.get_decoder()(input_ids=tokens, use_cache=False)
    # the eager kernel computes every pair, masked or not
    masked = 16 * 16 - 16 * 17 // 2
    counted = counter.get_total_flops() - shape.flops_per_pair * masked
    assert shape.flops(1, 16) == counted


def test_a_token_meets_only_the_experts_it_is_sent_to(tmp_path):
    model = tiny_model("mixtral")
    shape, config = shape_of(model, tmp_path), model.config
    expert = 3 * config.hidden_size * config.intermediate_size
    dense = sum(
        weight.numel() for layer in shape.layers for name, weight in layer.items() if weight.dim() == 2
    )
    met = config.num_hidden_layers * config.num_experts_per_tok * expert
    assert shape.flops_per_token == 2 * (dense + met)


# what DeepSeek-V3's config.json says of its sizes
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
    "torch_dtype": "bfloat16", "vocab_size": 129280, "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "tie_word_embeddings": False,
}  # fmt: skip


def test_deepseek_v3_as_its_makers_count_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    shape = model_shape(str(tmp_path))
    # its card: 671 B, of which a token meets 37 B
    assert shape.parameters == pytest.approx(671e9, rel=0.001)
    embeddings = 2 * 129280 * 7168
    assert shape.flops_per_token / 2 + embeddings == pytest.approx(37e9, rel=0.02)
    assert shape.cached_values == 61 * (512 + 64) == 35_136
    # each head: a key of 128 + 64, and a value of 128
    assert shape.flops_per_pair == 61 * 128 * 2 * (192 + 128)
    said = fp8kv("plan", tmp_path).stdout
    assert "KV cache: 70,272 bytes per token in 16 bits, 35,136 in FP8" in said
    one_line_error(fp8kv("bench", tmp_path), "deepseek_v3 caches latents (MLA)", "--heads")


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3", "glm4_moe_lite", "youtu"])
def test_flops_of_latents_are_those_that_torch_counts(family, tmp_path):
    model = tiny_model(family, **LATENT[family], attn_implementation="eager").eval()
    attention = shape_of(model, tmp_path)
    tokens = torch.arange(16)[None]
    found = []
    for length in (8, 16):
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            model.get_decoder()(input_ids=tokens[:, :length], use_cache=False)
        found.append(counter.get_total_flops())
    # what grows with the square of the length; the eager kernel computes masked pairs as well
    squared = (found[1] - 2 * found[0]) / (16**2 - 2 * 8**2)
    assert attention.flops_per_pair == squared


def test_all_layers_of_longcat_are_counted(tmp_path):
    model = tiny_model("longcat_flash", **{**LATENT["longcat_flash"], "num_hidden_layers": 6})
    assert model.config.num_layers == 3
    assert shape_of(model, tmp_path).cached_values == 6 * (16 + 8)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ('{"model_type": "nonsense"}', "cannot read")]
)
def test_a_config_that_cannot_be_read_is_one_line(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message) as error:
        model_shape(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_config_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"no nothing\.json|does not exist|cannot read"):
        model_shape(str(tmp_path / "nothing.json"))


def values_cached(model):
    """K and V per token that transformers' own cache holds, repeated heads counted once."""
    repeats = {m.layer_idx: m.kv_repeat for m in map_attention(model).cached.values()}
    tokens = torch.arange(3, 6)[None]
    with torch.inference_mode():
        layers = model(tokens, use_cache=True).past_key_values.layers
    held = [(layers[i].keys, layers[i].values, repeat) for i, repeat in repeats.items()]
    return sum((k.numel() + v.numel()) // (3 * repeat) for k, v, repeat in held)


SMALL_MAMBA = {"mamba_d_head": 16, "mamba_n_groups": 1}
OTHERS = {
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_bigcode": {},
    "gemma3n_text": SHARED_KV,
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "falcon_h1": {**SMALL_MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}


@pytest.mark.parametrize(
    ("family", "options"),
    # with num_key_value_heads, which its config does not have, gpt_neox would not be itself
    [(k, v) for k, v in {**FAMILIES, **HYBRIDS, **OTHERS, **LATENT}.items() if k != "gpt_neox"],
)
def test_the_cache_is_what_the_model_itself_keeps(family, options, tmp_path):
    model = tiny_model(family, **options)
    assert shape_of(model, tmp_path).cached_values == values_cached(model)


def test_attention_behind_a_wrapper_is_found(tmp_path):
    document = {
        "model_type": "gpt_neo",
        "architectures": ["GPTNeoForCausalLM"],
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "num_heads": 4,
        "hidden_size": 64,
        "vocab_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert model_shape(str(tmp_path)).cached_values == 2 * 2 * 64


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"])
def test_a_model_without_k_and_v_is_refused(family, tmp_path):
    document = {"model_type": family, "architectures": ["XForCausalLM"], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(document))
    for command in ("plan", "bench"):
        done = fp8kv(command, tmp_path)
        one_line_error(done, "no layer of XForCausalLM attends", "it has no KV cache to calibrate")


@pytest.mark.parametrize("family", ["recurrent_gemma", "minimax", "nemotron_h", "jetmoe", "moshi"])
def test_other_models_are_planned_for_or_refused_in_one_line(family, tmp_path):
    document = {"model_type": family, "architectures": ["XForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(document))
    done = fp8kv("plan", tmp_path)
    assert done.exit_code == 0 or one_line_error(done, "config") is None


def short(directory, positions):
    """A config of a model with that many positions."""
    config = {**tiny_model("llama").config.to_dict(), "max_position_embeddings": positions}
    config["architectures"] = ["LlamaForCausalLM"]
    (directory / "config.json").write_text(json.dumps(config, default=str))
    return directory / "config.json"


def test_the_default_length_is_cut_to_the_models_positions(tmp_path):
    config = short(tmp_path, 1000)
    printed = fp8kv("plan", config).stdout
    assert "512 samples of 1000 tokens" in printed
    assert "--seq-len 1000 " in printed
    assert "note: samples are cut to the model's 1000 positions" in printed
    assert json.loads(fp8kv("plan", config, "--json").stdout)["workload"]["seq_len"] == 1000
    assert "--seq-len 2048 " in fp8kv("plan", short(tmp_path, 4096)).stdout


def test_a_length_that_was_typed_is_refused(tmp_path):
    done = fp8kv("plan", short(tmp_path, 1000), "--seq-len", "1001")
    one_line_error(done, "--seq-len 1001 is longer than the model's 1000 positions")
