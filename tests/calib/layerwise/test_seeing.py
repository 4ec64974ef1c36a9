"""Models that see: the whole model reads text, or its decoder where that is the same."""

import pytest
import torch
from families import SHARED_KV, save_model, tiny_model, tiny_vision_language_model
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.gemma3n import modeling_gemma3n
from transformers.models.idefics3.modeling_idefics3 import Idefics3Model
from transformers.models.llava.modeling_llava import LlavaModel

from calib.capture.attention import map_attention
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
