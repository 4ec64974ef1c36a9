"""The demo, on the real model and corpus: every figure recomputed with plain transformers."""

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from calib.data import load_data, make_batches
from calib.generate import GenerationOptions, generate_text
from calib.job import run
from calib.recipe import load_recipe
from calib.scales.stats_file import load_stats

DEMO = {
    "strategy": "attn_head",
    "targets": "qkv",
    "data.dataset": "builtin:python-docs",
    "data.samples": 6,
    "data.seq_len": 128,
    "data.batch_size": 4,
    "device": "cpu",
    "dtype": "float32",
}
TOKENS = DEMO["data.samples"] * DEMO["data.seq_len"]


@pytest.fixture(scope="module")
def demo(smollm2_directory, tmp_path_factory):
    return run("builtin:smollm2", load_recipe(None, DEMO), tmp_path_factory.mktemp("demo") / "out")


@pytest.fixture(scope="module")
def model(smollm2_directory):
    return AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype="float32").eval()


class QueryAmax(TorchFunctionMode):
    """Running amax of the query of each SDPA call; the n-th call of a forward is layer n."""

    def __init__(self, layers):
        super().__init__()
        self.amax = [torch.zeros(9, 64)] * layers
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.scaled_dot_product_attention:
            layer = self.calls % len(self.amax)
            self.amax[layer] = running_max(self.amax[layer], args[0])
            self.calls += 1
        return func(*args, **(kwargs or {}))


def running_max(amax, x):
    return torch.maximum(amax, x.abs().amax((0, 2)).float())


def test_every_amax_is_that_of_plain_transformers_forwards(demo, model, smollm2_directory):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory)
    data = load_data(demo.recipe.data, tokenizer, lambda: model)
    batches = make_batches(data.samples, int(demo.recipe.data.batch_size), pad_id=0)
    assert all(batch.attention_mask.all() for batch in batches)
    k, v = ([torch.zeros(3, 64)] * 30 for _ in "kv")
    queries = QueryAmax(30)
    for batch in batches:
        cache = DynamicCache()
        with torch.inference_mode(), queries:
            model.model(batch.input_ids, past_key_values=cache, use_cache=True)
        for i, layer in enumerate(cache.layers):
            k[i], v[i] = running_max(k[i], layer.keys), running_max(v[i], layer.values)
    measured = load_stats(demo.output).layers
    assert [layer.tokens for layer in measured.values()] == [TOKENS] * 30
    for i, layer in enumerate(measured.values()):
        assert torch.equal(layer.k.amax, k[i])
        assert torch.equal(layer.v.amax, v[i])
        assert torch.equal(layer.q.amax, queries.amax[i])


def test_the_calibrated_model_still_writes_sense(demo):
    options = GenerationOptions(max_new_tokens=4, compare=True)
    made = generate_text(
        str(demo.output), "The capital of France is", options=options, overrides={"device": "cpu"}
    )
    assert made.fp8.text.startswith(" Paris.")
    assert made.plain.text.startswith(" Paris.")
    assert made.bytes_per_token == 30 * 2 * 3 * 64


def test_every_weight_is_the_sources_bit_for_bit(demo, smollm2_directory):
    with (
        safe_open(smollm2_directory / "model.safetensors", framework="pt") as source,
        safe_open(demo.output / "model-00001-of-00001.safetensors", framework="pt") as written,
    ):
        assert set(source.keys()) == set(written.keys())
        for name in source.keys():  # noqa: SIM118
            assert torch.equal(source.get_tensor(name), written.get_tensor(name))


def test_an_output_without_quantization_config_gives_the_sources_logits(model, smollm2_directory, tmp_path):
    changes = {"strategy": "tensor", "targets": "kv", "export.formats": ["tgi"]}
    small = {"data.samples": 2, "data.seq_len": 64}
    out = run("builtin:smollm2", load_recipe(None, {**DEMO, **changes, **small}), tmp_path / "tgi")
    written = AutoModelForCausalLM.from_pretrained(out.output, dtype="float32").eval()
    tokens = AutoTokenizer.from_pretrained(out.output)("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        assert torch.equal(written(**tokens).logits, model(**tokens).logits)


def test_text_that_the_model_itself_writes_is_calibrated_on(smollm2_directory, tmp_path):
    changes = {"data.dataset": "self", "data.samples": 6, "data.seq_len": 24}
    result = run("builtin:smollm2", load_recipe(None, {**DEMO, **changes}), tmp_path / "out")
    assert result.tokens <= 6 * 24
    assert result.warnings
    assert len(result.layers) == 30
