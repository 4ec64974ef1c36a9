"""`fp8kv generate`: text, speed and bytes on the FP8 cache, and one line for each mistake."""

import json

import pytest
from command_line import calibrate, fp8kv, one_line_error
from families import save_model, tiny_model
from generation import PROMPT, as_json, continuation, generate
from transformers import AutoTokenizer

from calib.generate import Generation, GenerationResult
from calib.scales.stats_file import load_scales

BYTES_PER_TOKEN = 3 * 2 * 2 * 16  # layers, K and V, KV heads, head_dim


@pytest.fixture
def calibrated(tiny_directory, tmp_path):
    out = tmp_path / "out"
    assert calibrate(tiny_directory, "-o", out, "--strategy", "attn_head").exit_code == 0
    return out


def test_text_speed_and_bytes(calibrated, tiny_directory):
    done = generate(calibrated, PROMPT)
    assert done.exit_code == 0, done.stderr
    expected = continuation(tiny_directory, load_scales(calibrated))
    text = AutoTokenizer.from_pretrained(tiny_directory).decode(expected)
    lines = done.stdout.splitlines()
    assert lines[0].split() == text.split()
    assert f"{len(expected)} tokens in " in lines[1]
    assert "tokens/s" in lines[1]
    assert lines[2] == (
        f"KV cache: {BYTES_PER_TOKEN} bytes a token in FP8, {2 * BYTES_PER_TOKEN} in 16 bits (0.50x)"
    )
    assert lines[3].startswith("14 tokens in blocks of 64: ")


def test_json_says_the_same(calibrated, tiny_directory):
    facts = as_json(tiny_directory, PROMPT, "--scales", calibrated)
    assert facts["fp8"]["token_ids"] == continuation(tiny_directory, load_scales(calibrated))
    assert facts["plain"] is None
    assert facts["bytes_per_token"] == BYTES_PER_TOKEN
    assert facts["cached_tokens"] == 6 + 9 - 1  # the last token is never fed back
    assert facts["cache_bytes"] == 64 * BYTES_PER_TOKEN
    assert facts["cache_bytes_16bit"] == 14 * 2 * BYTES_PER_TOKEN


def test_compare_adds_transformers_own_text(calibrated, tiny_directory):
    facts = as_json(calibrated, PROMPT, "--compare")
    assert facts["plain"]["token_ids"] == continuation(tiny_directory)
    pairs = zip(facts["fp8"]["token_ids"], facts["plain"]["token_ids"], strict=True)
    differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    assert facts["same_tokens"] == (differing[0] if differing else 9)
    assert "with a 16-bit cache" in generate(calibrated, PROMPT, "--compare").stdout


@pytest.mark.parametrize(("theirs", "same"), [([4, 5, 6], 3), ([4, 5, 7], 2), ([8, 5, 6], 0), ([4], 1)])
def test_where_two_texts_part(theirs, same):
    ours, plain = Generation("", [4, 5, 6], 1.0), Generation("", theirs, 1.0)
    assert GenerationResult(ours, plain, 3, 64, 1, 1).same_tokens == same


def test_scale_one_needs_no_calibration(tiny_directory):
    facts = as_json(tiny_directory, PROMPT, "--scales", "none")
    assert len(facts["fp8"]["token_ids"]) == 9


def without_calibration(directory):
    """The same scales, as another tool could have written them."""
    for file in ("fp8kv_stats.safetensors", "fp8kv_calibration.json"):
        (directory / file).unlink()
    return directory


def test_scales_of_another_tool_are_taken_beside_a_model_or_within_it(calibrated, tiny_directory):
    expected = continuation(tiny_directory, load_scales(calibrated))
    foreign = without_calibration(calibrated)
    beside = as_json(tiny_directory, PROMPT, "--scales", foreign)
    assert beside["fp8"]["token_ids"] == expected
    assert as_json(foreign, PROMPT)["fp8"]["token_ids"] == expected


@pytest.mark.parametrize("layout", ["json", "fp8kv"])
def test_outputs_without_weights_are_scales_too(layout, tiny_directory, tmp_path):
    out = tmp_path / "out"
    assert calibrate(tiny_directory, "-o", out, "--format", layout).exit_code == 0
    found = as_json(tiny_directory, PROMPT, "--scales", out)["fp8"]["token_ids"]
    if layout == "fp8kv":
        assert found == continuation(tiny_directory, load_scales(out))
    else:  # which serves K and V with one scale
        again = as_json(tiny_directory, PROMPT, "--scales", without_calibration(out))
        assert found == again["fp8"]["token_ids"]


def test_bad_scales_are_found_before_the_model_is_loaded(tiny_directory, tmp_path, monkeypatch):
    monkeypatch.setattr("calib.generate.load_model", lambda *_: pytest.fail("loaded"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "kv_cache_scales.json").write_text("{")
    done = generate(tiny_directory, PROMPT, "--scales", tmp_path / "bad")
    one_line_error(done, "kv_cache_scales.json' is not JSON")


def test_sampling_repeats_with_its_seed(calibrated):
    first, again, other = (
        as_json(calibrated, PROMPT, "--temperature", "2", "--seed", seed)["fp8"]["token_ids"]
        for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other


def test_a_chat_template_is_applied(calibrated):
    template = "w3 {{ messages[0]['content'] }} w4"
    path = calibrated / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    facts = as_json(calibrated, PROMPT, "--chat")
    assert facts["cached_tokens"] == 1 + 6 + 1 + 9 - 1


def test_mistakes_get_one_line(calibrated, tiny_directory, tmp_path):
    one_line_error(generate(calibrated, ""), "the prompt is empty")
    one_line_error(generate(calibrated, PROMPT, "--chat"), "no chat template; leave out --chat")
    one_line_error(generate(tiny_directory, PROMPT), "holds no KV-cache scales", "--scales none")
    no = tmp_path / "no"
    one_line_error(generate(tiny_directory, PROMPT, "--scales", no), f"'{no}' is not a directory")
    one_line_error(
        fp8kv("generate", calibrated, PROMPT, "--max-new-tokens", "251"),
        "prompt + --max-new-tokens 257 is longer than the model's 256 positions",
    )


def test_scales_of_another_model(calibrated, tmp_path):
    neox = save_model(tiny_model("gpt_neox"), tmp_path / "neox")
    one_line_error(
        generate(neox, PROMPT, "--scales", calibrated),
        f"'{calibrated}' is of another model: its config says model_type llama",
        f"that of '{neox}' gpt_neox",
    )


def test_scales_of_another_model_with_the_same_layer_names(calibrated, tmp_path):
    # its layers and heads are as many
    mistral = save_model(tiny_model("mistral"), tmp_path / "mistral")
    one_line_error(generate(mistral, PROMPT, "--scales", calibrated), "model_type llama", "mistral")


def test_kernels_without_a_gpu(calibrated, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    one_line_error(generate(calibrated, PROMPT, "--backend", "triton"), "need a GPU")


def test_a_temperature_next_to_zero_is_greedy(calibrated):
    cold, greedy = (as_json(calibrated, PROMPT, "--temperature", t)["fp8"] for t in ("1e-300", "0"))
    assert cold["token_ids"] == greedy["token_ids"]
