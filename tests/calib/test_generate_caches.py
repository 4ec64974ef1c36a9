"""`fp8kv generate --cache TYPE`: text on a cache that is simulated, and what refuses."""

import json

import pytest
import torch
from command_line import one_line_error
from families import save_model, tiny_model
from generation import PROMPT, as_json, continuation, generate
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.caches.per_token_head import int8_per_token_head
from calib.caches.rounding import rounding
from fp8kv_runtime.hf import swap_attention

VALUES = 3 * 2 * 2 * 16  # layers, K and V, KV heads, head_dim
SCALES = 3 * 2 * 2 * 4  # a float32 for each vector


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


def test_int8_is_what_attention_reads(tiny_directory):
    facts = as_json(tiny_directory, PROMPT, "--cache", "int8_per_token_head", "--compare")
    assert facts["cache"] == "int8_per_token_head"
    assert facts["fp8"]["token_ids"] == rounded_continuation(tiny_directory)
    assert facts["plain"]["token_ids"] == continuation(tiny_directory)
    assert facts["bytes_per_token"] == VALUES + SCALES
    assert facts["bytes_per_token_16bit"] == 2 * VALUES
    assert facts["cache_bytes"] == (6 + 9 - 1) * (VALUES + SCALES)
    assert facts["block_size"] is None


def test_lmdeploy_keeps_its_scales_in_the_dtype_of_the_config(tiny_llama, tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(
        "calib.generate.rounding",
        lambda name, dtype: taken.append(dtype) or rounding(name, dtype=dtype),
    )
    directory = save_model(tiny_llama, tmp_path / "tiny")
    config = json.loads((directory / "config.json").read_text())
    config.pop("dtype", None)
    (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    as_json(directory, PROMPT, "--cache", "lmdeploy_int4", "--dtype", "float32")
    assert taken == [torch.bfloat16]


def test_a_coarser_cache_writes_other_text(tiny_directory):
    texts = [
        as_json(tiny_directory, PROMPT, "--cache", cache)["fp8"]["token_ids"]
        for cache in ("int4_per_token_head", "nvfp4")
    ]
    assert continuation(tiny_directory) not in texts


def test_it_is_said_that_speed_and_blocks_are_no_engines(tiny_directory):
    said = generate(tiny_directory, PROMPT, "--cache", "fp8_per_token_head", "--compare").stdout
    ratio = (VALUES + SCALES) / (2 * VALUES)
    assert (
        f"KV cache: {VALUES + SCALES} bytes a token in fp8_per_token_head, {2 * VALUES} in 16 bits "
        f"({ratio:.2f}x)" in said
    )
    assert "simulated, so the speed is not an engine's; known from vLLM" in said
    assert "blocks of" not in said
    assert "runs at" not in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--cache", "int9"), "cache 'int9' is not one of fp8, fp8_per_token_head"),
        (("--cache", "nvfp4", "--scales", "none"), "--scales is for --cache fp8, not for nvfp4"),
        (("--cache", "nvfp4", "--backend", "triton"), "--backend triton is for --cache fp8"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_model_is_loaded(flags, said, tiny_directory, monkeypatch):
    monkeypatch.setattr("calib.generate.load_model", lambda *_: pytest.fail("loaded"))
    one_line_error(generate(tiny_directory, PROMPT, *flags), said)


def test_a_head_size_that_the_type_does_not_allow_is_refused(tmp_path):
    odd = tiny_model("llama", head_dim=24)
    done = generate(save_model(odd, tmp_path / "odd"), PROMPT, "--cache", "nvfp4")
    one_line_error(done, "nvfp4: head size 24 is not a multiple of 16")
