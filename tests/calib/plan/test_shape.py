"""A model's cost from its config: published sizes, and what torch counts on the model itself."""

import json
from pathlib import Path

import pytest
import torch
from families import tiny_model
from torch.utils.flop_counter import FlopCounterMode

from calib.errors import InputError, UnsupportedModelError
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
    document = {**model.config.to_dict(), "architectures": ["XForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(document, default=str))
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
        weight.numel()
        for layer in shape.layers
        for name, weight in layer.items()
        if weight.dim() == 2
    )
    met = config.num_hidden_layers * config.num_experts_per_tok * expert
    assert shape.flops_per_token == 2 * (dense + met)


def test_a_model_with_latents_instead_of_k_and_v_is_refused(tmp_path):
    document = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedModelError, match="MLA"):
        model_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot read"), ('{"model_type": "nonsense"}', "cannot read")]
)
def test_a_config_that_cannot_be_read_is_one_line(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message) as error:
        model_shape(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_config_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"no nothing\.json|does not exist|cannot read"):
        model_shape(str(tmp_path / "nothing.json"))
