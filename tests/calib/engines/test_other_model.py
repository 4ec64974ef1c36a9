"""Configs of no model, or of another than the weights are of; each was run in both engines."""

import pytest
from loading import SCALES, WEIGHTS, said, write
from scale_directories import COMPRESSED


@pytest.mark.parametrize(
    ("changes", "vllm", "sglang"),
    [
        ({"num_hidden_layers": 1}, "refused", "not known"),  # SGLang serves without the second
        ({"num_hidden_layers": 3}, "not known", "not known"),  # both serve a third of no weights
        ({"num_hidden_layers": 10**12}, "not known", "not known"),
        ({"num_hidden_layers": 0}, "refused", "refused"),
        ({"num_hidden_layers": -1}, "refused", "refused"),
        ({"num_hidden_layers": "2"}, "refused", "refused"),
        ({"num_hidden_layers": 2.0}, "refused", "refused"),
        ({"num_hidden_layers": True}, "refused", "refused"),
        ({"num_hidden_layers": None}, "refused", "refused"),
        ({"num_hidden_layers": [2]}, "refused", "refused"),
        ({"num_key_value_heads": 0}, "refused", "refused"),
        ({"num_key_value_heads": -2}, "refused", "refused"),
        ({"num_key_value_heads": "2"}, "refused", "refused"),
        ({"num_attention_heads": 0}, "refused", "refused"),
        ({"num_attention_heads": "4"}, "refused", "refused"),
        ({"model_type": None}, "refused", "refused"),
        ({"model_type": ""}, "refused", "refused"),
        ({"model_type": 5}, "refused", "refused"),
        # the weights of a Llama
        ({"architectures": ["OPTForCausalLM"]}, "not known", "not known"),
    ],
)
def test_a_config_that_no_engine_starts_with(changes, vllm, sglang, tmp_path):
    directory = write(tmp_path, WEIGHTS, SCALES, **changes)
    assert (said(directory, "vllm"), said(directory, "sglang")) == (vllm, sglang)
    assert {said(directory, engine) for engine in ("aphrodite", "tgi")} <= {"not known", "refused"}


@pytest.mark.parametrize("settings", [{"config_groups": [1]}, {"config_groups": "x"}, {"ignore": 3}])
def test_a_config_of_weights_that_was_never_run(settings, tmp_path):
    directory = write(tmp_path, WEIGHTS, SCALES, COMPRESSED | settings)
    assert (said(directory, "vllm"), said(directory, "sglang")) == ("not known", "not known")


def test_layers_that_guess_tokens_need_no_scales(tmp_path):
    weights = [*WEIGHTS, "model.layers.2.self_attn.k_proj.weight"]
    document = {"architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 2}
    made = write(tmp_path, weights, SCALES, num_nextn_predict_layers=1, **document)
    assert said(made, "vllm") == "loaded"
    made = write(tmp_path, weights, SCALES, **document)
    assert said(made, "vllm") == "refused"
