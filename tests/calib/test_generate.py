"""`fp8kv generate`: text, speed and bytes on an FP8 cache or a simulated one; a line for each mistake."""

import json
import shutil

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error, succeeded
from families import save_model, tiny_model
from generation import PROMPT, as_json, continuation, generate
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.caches.per_token_head import int8_per_token_head
from calib.caches.rounding import rounding
from calib.generate import Generation, GenerationResult
from calib.scales.stats_file import load_scales
from fp8kv_runtime.hf import swap_attention

BYTES_PER_TOKEN = 3 * 2 * 2 * 16  # layers, K and V, KV heads, head_dim
VECTOR_SCALES = 3 * 2 * 2 * 4  # of a token, a float32 for each vector


@pytest.fixture(scope="module")
def calibrated(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrated") / "out"
    assert calibrate(model, "-o", out, "--strategy", "attn_head").exit_code == 0
    return out


def test_text_speed_and_bytes_are_printed_and_json_says_the_same(calibrated, model):
    expected = continuation(model, load_scales(calibrated))
    done = succeeded(generate(calibrated, PROMPT))
    lines = done.stdout.splitlines()
    assert lines[0].split() == AutoTokenizer.from_pretrained(model).decode(expected).split()
    assert f"{len(expected)} tokens in " in lines[1]
    assert "tokens/s" in lines[1]
    assert lines[2] == (
        f"KV cache: {BYTES_PER_TOKEN} bytes a token in FP8, {2 * BYTES_PER_TOKEN} in 16 bits (0.50x)"
    )
    assert lines[3].startswith("14 tokens in blocks of 64: ")
    facts = as_json(model, PROMPT, "--scales", calibrated)
    assert facts["fp8"]["token_ids"] == expected
    assert facts["plain"] is None
    assert facts["bytes_per_token"] == BYTES_PER_TOKEN
    assert facts["cached_tokens"] == 6 + 9 - 1  # the last token is never fed back
    assert facts["cache_bytes"] == 64 * BYTES_PER_TOKEN
    assert facts["cache_bytes_16bit"] == 14 * 2 * BYTES_PER_TOKEN


def test_compare_adds_transformers_own_text(calibrated, model):
    facts = as_json(calibrated, PROMPT, "--compare")
    assert facts["plain"]["token_ids"] == continuation(model)
    pairs = zip(facts["fp8"]["token_ids"], facts["plain"]["token_ids"], strict=True)
    differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    assert facts["same_tokens"] == (differing[0] if differing else 9)
    assert "with a 16-bit cache" in generate(calibrated, PROMPT, "--compare").stdout


@pytest.mark.parametrize(("theirs", "same"), [([4, 5, 6], 3), ([4, 5, 7], 2), ([8, 5, 6], 0), ([4], 1)])
def test_where_two_texts_part(theirs, same):
    ours, plain = Generation("", [4, 5, 6], 1.0), Generation("", theirs, 1.0)
    assert GenerationResult(ours, plain, 3, 64, 1, 1).same_tokens == same


def test_sampling_repeats_with_its_seed_and_next_to_zero_is_greedy(calibrated):
    def tokens(temperature, seed):
        flags = ("--temperature", temperature, "--seed", seed)
        return as_json(calibrated, PROMPT, *flags)["fp8"]["token_ids"]

    assert tokens("2", "1") == tokens("2", "1")
    assert tokens("2", "1") != tokens("2", "2")
    assert tokens("1e-300", "1") == tokens("0", "2")


def test_a_chat_template_is_applied(calibrated, tmp_path):
    one_line_error(generate(calibrated, PROMPT, "--chat"), "no chat template; leave out --chat")
    model = shutil.copytree(calibrated, tmp_path / "chats")
    path = model / "tokenizer_config.json"
    template = "w3 {{ messages[0]['content'] }} w4"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    assert as_json(model, PROMPT, "--chat")["cached_tokens"] == 1 + 6 + 1 + 9 - 1


def test_mistakes_get_one_line_before_the_model_is_loaded(calibrated, model, tmp_path, monkeypatch):
    monkeypatch.setattr("calib.generate.load_model", lambda *_: pytest.fail("loaded"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "kv_cache_scales.json").write_text("{")
    neox, mistral = (save_model(tiny_model(name), tmp_path / name) for name in ("gpt_neox", "mistral"))
    own = f"'{calibrated}' is of another model: its config says model_type llama"
    for arguments, phrases in (
        ((calibrated, ""), ["the prompt is empty"]),
        ((model, PROMPT), ["holds no KV-cache scales", "--scales none"]),
        ((model, PROMPT, "--scales", tmp_path / "no"), [f"'{tmp_path / 'no'}' is not a directory"]),
        ((model, PROMPT, "--scales", tmp_path / "bad"), ["kv_cache_scales.json' is not JSON"]),
        ((neox, PROMPT, "--scales", calibrated), [own, f"that of '{neox}' gpt_neox"]),
        # layers and heads are as many
        ((mistral, PROMPT, "--scales", calibrated), [own, "mistral"]),
    ):
        one_line_error(generate(*arguments), *phrases)
    one_line_error(
        fp8kv("generate", calibrated, PROMPT, "--max-new-tokens", "251"),
        "prompt + --max-new-tokens 257 is longer than the model's 256 positions",
    )


def test_kernels_without_a_gpu_are_refused_and_scale_one_needs_no_calibration(model, monkeypatch):
    facts = as_json(model, PROMPT, "--scales", "none")
    assert len(facts["fp8"]["token_ids"]) == 9
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    one_line_error(generate(model, PROMPT, "--scales", "none", "--backend", "triton"), "need a GPU")


def rounded_continuation(directory):
    """Token ids of a model whose K and V are INT8 wherever attention reads them."""

    def attend(original, module, query, key, value, *args, **kwargs):
        rounded = int8_per_token_head(key), int8_per_token_head(value)
        return original(module, query, *rounded, *args, **kwargs)

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    inputs = AutoTokenizer.from_pretrained(directory)(PROMPT, return_tensors="pt")
    with swap_attention(model, attend):
        output = model.generate(**inputs, max_new_tokens=9, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def test_int8_is_what_attention_reads_and_its_bytes_and_speed_are_said(model):
    facts = as_json(model, PROMPT, "--cache", "int8_per_token_head", "--compare")
    assert facts["cache"] == "int8_per_token_head"
    assert facts["fp8"]["token_ids"] == rounded_continuation(model)
    assert facts["plain"]["token_ids"] == continuation(model)
    assert facts["bytes_per_token"] == BYTES_PER_TOKEN + VECTOR_SCALES
    assert facts["bytes_per_token_16bit"] == 2 * BYTES_PER_TOKEN
    assert facts["cache_bytes"] == (6 + 9 - 1) * (BYTES_PER_TOKEN + VECTOR_SCALES)
    assert facts["block_size"] is None
    said = generate(model, PROMPT, "--cache", "int8_per_token_head", "--compare").stdout
    size, plain = BYTES_PER_TOKEN + VECTOR_SCALES, 2 * BYTES_PER_TOKEN
    ratio = f"({size / plain:.2f}x)"
    assert f"KV cache: {size} bytes a token in int8_per_token_head, {plain} in 16 bits {ratio}" in said
    assert "simulated, so the speed is not an engine's; known from vLLM" in said
    assert "blocks of" not in said
    assert "runs at" not in said


def test_a_coarser_cache_writes_other_text(model):
    texts = [
        as_json(model, PROMPT, "--cache", cache)["fp8"]["token_ids"]
        for cache in ("int4_per_token_head", "nvfp4")
    ]
    assert continuation(model) not in texts


def test_lmdeploy_keeps_its_scales_in_the_dtype_of_the_config(tiny_directory, monkeypatch):
    taken = []
    monkeypatch.setattr(
        "calib.generate.rounding",
        lambda name, dtype: taken.append(dtype) or rounding(name, dtype=dtype),
    )
    config = json.loads((tiny_directory / "config.json").read_text())
    config.pop("dtype", None)
    (tiny_directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    as_json(tiny_directory, PROMPT, "--cache", "lmdeploy_int4", "--dtype", "float32")
    assert taken == [torch.bfloat16]


def test_what_does_not_fit_a_cache_is_refused(model, tmp_path, monkeypatch):
    odd = save_model(tiny_model("llama", head_dim=24), tmp_path / "odd")
    done = generate(odd, PROMPT, "--cache", "nvfp4")
    one_line_error(done, "nvfp4: head size 24 is not a multiple of 16")
    monkeypatch.setattr("calib.generate.load_model", lambda *_: pytest.fail("loaded"))
    for flags, said in (
        (("--cache", "int9"), "cache 'int9' is not one of fp8, fp8_per_token_head"),
        (("--cache", "nvfp4", "--scales", "none"), "--scales is for --cache fp8, not for nvfp4"),
        (("--cache", "nvfp4", "--backend", "triton"), "--backend triton is for --cache fp8"),
    ):
        one_line_error(generate(model, PROMPT, *flags), said)
