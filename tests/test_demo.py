"""The demo, on the real model and corpus: every figure recomputed with plain transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from calib.data import load_data
from calib.generate import GenerationOptions, generate_text
from calib.job import run
from calib.recipe import load_recipe
from calib.scales.stats_file import load_stats

DEMO = {"strategy": "attn_head", "data.dataset": "builtin:python-docs", "device": "cpu"}
DEMO |= {"data.samples": 6, "data.seq_len": 128, "data.batch_size": 6, "dtype": "float32"}
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def demo(smollm2_directory, tmp_path_factory):
    return run("builtin:smollm2", load_recipe(None, DEMO), tmp_path_factory.mktemp("demo") / "out")


def test_every_amax_is_that_of_plain_transformers_forwards(demo, smollm2_directory):
    model = AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory)
    samples, cache = load_data(demo.recipe.data, tokenizer, lambda: model).samples, DynamicCache()
    with torch.inference_mode():
        model.model(torch.tensor(samples), past_key_values=cache, use_cache=True)
    for layer, held in zip(load_stats(demo.output).layers.values(), cache.layers, strict=True):
        assert layer.tokens == 6 * 128
        assert torch.equal(layer.k.amax, held.keys.abs().amax((0, 2)))
        assert torch.equal(layer.v.amax, held.values.abs().amax((0, 2)))


def test_the_calibrated_model_still_writes_sense(demo):
    options = GenerationOptions(max_new_tokens=4, compare=True)
    made = generate_text(str(demo.output), PROMPT, options=options, overrides={"device": "cpu"})
    assert made.fp8.text.startswith(" Paris.")
    assert made.plain.text.startswith(" Paris.")
    assert made.bytes_per_token == 30 * 2 * 3 * 64
