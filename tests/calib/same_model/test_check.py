"""Two models are told apart by what their configs say, and by nothing else."""

import json

import pytest

from calib.errors import InputError
from calib.same_model.check import ModelFacts, check_same_model, config_summary, directory_facts, known_config

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64}
LLAVA = {"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 64}}


def check(one, other, path):
    check_same_model(ModelFacts(str(path / "one"), one), ModelFacts(str(path / "other"), other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LLAMA, LLAMA),
        (LLAMA, {}),
        ({}, {}),
        (LLAMA, LLAVA),  # its language model, served alone
        (LLAMA, LLAMA | {"architectures": ["OwnForCausalLM"]}),
        (LLAMA, {"model_type": "llama"}),
        (LLAMA, LLAMA | {"hidden_size": None, "quantization_config": {}, "vocab_size": 1}),
        # a flat config of old, and the same model saved again
        (
            {"model_type": "qwen2_vl"},
            {"model_type": "qwen2_vl", "text_config": {"model_type": "t"}},
        ),
    ],
)
def test_what_may_be_one_model_passes(one, other, tmp_path):
    check(one, other, tmp_path)
    check(other, one, tmp_path)
    check(config_summary(one), other, tmp_path)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (LLAMA, QWEN, "model_type llama, that of '.*other' qwen2"),
        (QWEN, LLAVA, "model_type qwen2, that of '.*other' llama"),
        (
            LLAVA,
            {**LLAVA, "text_config": {"model_type": "mistral"}},
            "model_type llama, that of .* mistral",
        ),
        (LLAMA, LLAMA | {"hidden_size": 128}, "hidden_size 64, that of '.*other' 128"),
        (LLAMA | {"model_type": None}, QWEN, r"architectures \['LlamaForCausalLM'\]"),
    ],
)
def test_what_is_known_to_differ_is_refused(one, other, message, tmp_path):
    for said in (one, config_summary(one)):
        with pytest.raises(InputError, match=f"one' is of another model: its config says {message}"):
            check(said, other, tmp_path)


def test_every_directory_says_what_it_can(tmp_path):
    assert known_config(tmp_path) == {}
    (tmp_path / "kv_cache_scales.json").write_text(json.dumps({"model_type": "llama"}))
    assert known_config(tmp_path) == {"model_type": "llama"}
    assert directory_facts(tmp_path) == ModelFacts(str(tmp_path), {"model_type": "llama"})
    (tmp_path / "fp8kv_calibration.json").write_text(json.dumps({"config": QWEN}))
    assert known_config(tmp_path) == QWEN
    (tmp_path / "config.json").write_text(json.dumps(LLAVA))
    assert known_config(tmp_path) == LLAVA
