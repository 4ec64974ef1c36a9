"""Heads that `fp8kv bench MODEL` takes from a config, and configs that it refuses."""

import json
from pathlib import Path

import pytest
from command_line import fp8kv, one_line_error
from families import LATENT, tiny_model

from calib.bench import attention_heads
from calib.errors import InputError

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


@pytest.mark.parametrize(
    ("model", "heads"),
    [(str(CONFIGS / "llama-3.1-8b.json"), (32, 8, 128)), ("builtin:smollm2", (9, 3, 64))],
)
def test_heads_of_a_config_and_of_the_bundled_model(model, heads):
    assert attention_heads(model) == heads


def test_one_kv_head_of_multi_query_attention(tmp_path):
    document = tiny_model("gpt_bigcode").config.to_dict() | {"architectures": ["GPTBigCodeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(document, default=str))
    heads, kv_heads, head_dim = attention_heads(str(tmp_path))
    assert (kv_heads, heads * head_dim) == (1, document["n_embd"])


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
def test_latents_are_refused(family, tmp_path):
    document = tiny_model(family, **LATENT[family]).config.to_dict() | {"architectures": ["XForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(document, default=str))
    one_line_error(fp8kv("bench", tmp_path), f"{family} caches latents (MLA)", "--heads")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ('{"model_type": "nonsense"}', "cannot read")]
)
def test_a_config_that_cannot_be_read_is_one_line(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message) as error:
        attention_heads(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_config_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"no nothing\.json|does not exist|cannot read"):
        attention_heads(str(tmp_path / "nothing.json"))


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"])
def test_a_model_without_k_and_v_is_refused(family, tmp_path):
    document = {"model_type": family, "architectures": ["XForCausalLM"], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(document))
    one_line_error(
        fp8kv("bench", tmp_path), "no layer of XForCausalLM attends", "it has no KV cache to calibrate"
    )
