"""Models that see: the whole model reads text, or its decoder where that is the same."""

import pytest
import torch
from families import SHARED_KV, save_model, tiny_model, tiny_vision_language_model
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.gemma3n import modeling_gemma3n
from transformers.models.idefics3.modeling_idefics3 import Idefics3Model
from transformers.models.llava.modeling_llava import LlavaModel

from calib.capture.attention import _is_equal, map_attention
from calib.errors import UnsupportedModelError
from calib.job import run
from calib.recipe import load_recipe

MISSING = "pixel_values are missing"


@pytest.fixture
def gemma3n(monkeypatch):
    """Gemma 3n that sees and hears, but for its towers: text alone does not pass through them."""
    auto = modeling_gemma3n.AutoModel

    class Towerless:
        @staticmethod
        def from_config(config):
            return auto.from_config(config) if "text" in config.model_type else nn.Identity()

    monkeypatch.setattr(modeling_gemma3n, "AutoModel", Towerless)
    text = tiny_model("gemma3n_text", **SHARED_KV).config.to_dict()
    tower = {"hidden_size": 32, "vocab_size": 8}
    config = AutoConfig.for_model(
        "gemma3n",
        text_config={**text, "vocab_size_per_layer_input": 104},
        vision_config={**tower, "vocab_offset": 104},
        audio_config={**tower, "vocab_offset": 112},
    )
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).eval()


def test_a_whole_model_that_needs_weights_around_its_decoder(gemma3n, save, assert_same):
    saved = save(gemma3n)
    recipe, batches = saved.recipe(means=True), saved.batches([[5, 9, 80, 3], [7, 2, 60]])
    in_memory = saved.in_memory(recipe, batches)
    attention = saved.open(recipe).parts.attention
    assert (map_attention(gemma3n).reader, attention.reader) == ("model", "model.language_model")
    assert not attention.note
    assert_same(saved.by_layer(recipe, batches), in_memory)


def test_is_refused_where_its_decoder_alone_caches_something_else(save, monkeypatch):
    saved = save(tiny_vision_language_model("idefics3", model_type="llama"))
    forward = Idefics3Model.forward

    def moved(self, input_ids, attention_mask, **kwargs):
        positions = torch.arange(1, input_ids.shape[1] + 1)[None]
        return forward(self, input_ids, attention_mask, position_ids=positions, **kwargs)

    monkeypatch.setattr(Idefics3Model, "forward", moved)
    with pytest.raises(UnsupportedModelError, match=r"other K or V than its decoder alone.*none"):
        saved.open(saved.recipe())


@pytest.mark.parametrize("offload", ["none", "layerwise"])
def test_a_note_says_that_the_decoder_alone_was_measured(offload, tmp_path, monkeypatch):
    save_model(tiny_vision_language_model("llava", model_type="llama"), tmp_path / "model")

    def forward(self, input_ids, pixel_values=None, **kwargs):
        raise ValueError(MISSING)

    monkeypatch.setattr(LlavaModel, "forward", forward)
    data = {"data.dataset": "random", "data.samples": 6, "data.seq_len": 32}
    recipe = load_recipe(None, {**data, "device": "cpu", "offload": offload})
    result = run(str(tmp_path / "model"), recipe, tmp_path / "out")
    said = "the decoder alone was measured, as the whole model takes no text alone"
    assert f"{said}: {MISSING}" in result.warnings


def test_only_missing_weights_excuse_the_whole_model(monkeypatch):
    model = tiny_vision_language_model("llava", model_type="llama")

    def forward(self, input_ids, **kwargs):
        raise RuntimeError("a meta tensor, though all weights are here")

    monkeypatch.setattr(LlavaModel, "forward", forward)
    with pytest.raises(Exception, match="a meta tensor, though all weights are here"):
        map_attention(model)


def test_a_reader_with_a_head_computes_the_logits_of_one_token():
    model, shapes = tiny_vision_language_model("llama4"), []
    assert map_attention(model).reader == ""
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, logits: shapes.append(logits.shape[:2]))
    attention = map_attention(model)
    attention.read(model, torch.tensor([[3, 1, 4], [1, 5, 9]]))
    assert shapes == [(1, 1), (2, 1)]


class _OnAnotherGPU(torch.Tensor):
    """A tensor that must be moved before it is compared."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.equal:
            raise RuntimeError("Expected all tensors to be on the same device")
        if function is torch.Tensor.to:
            return torch.Tensor(args[0].tolist())
        return super().__torch_function__(function, types, args, kwargs or {})


def test_keys_on_different_gpus_are_compared():
    model = tiny_model("llama")
    tokens = torch.tensor([[3, 1, 4]])
    with torch.inference_mode():
        cache = model(input_ids=tokens, use_cache=True).past_key_values
    first, second = cache.layers[0].keys.clone(), cache.layers[1].keys.clone()
    keys = [layer.keys.as_subclass(_OnAnotherGPU) for layer in cache.layers]
    assert _is_equal(keys[0], first)
    assert _is_equal(keys[1], second)
    assert not _is_equal(keys[1], first)
