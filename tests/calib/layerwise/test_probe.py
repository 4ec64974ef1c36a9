"""Models that cannot run layer by layer are refused, before any weight is read."""

import pytest
import torch
from families import edit_json
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from calib.capture.attention import AttentionMap
from calib.errors import InputError, UnsupportedModelError
from calib.files import tensors as file_tensors
from calib.layerwise.probe import find_layers, random_bytes, random_weights
from calib.layerwise.weights import plan_stages


@pytest.fixture
def _reads_nothing(monkeypatch):
    monkeypatch.setattr(file_tensors.StoredTensor, "read", lambda *_: pytest.fail("a weight was read"))


def leave_behind(self, forward, left, hidden_states, **kwargs):
    # what the second layer finds there is that of the last batch, not of its own
    if self.self_attn.layer_idx == 0:
        left["behind"] = hidden_states[:1, :1].clone()
    return forward(self, hidden_states + left["behind"], **kwargs)


def hand_over(self, forward, left, hidden_states, position_embeddings, **kwargs):
    cos, _ = position_embeddings  # made anew by each forward pass
    if self.self_attn.layer_idx == 0:
        cos.handed_over = hidden_states
    return forward(self, hidden_states + cos.handed_over, position_embeddings=position_embeddings, **kwargs)


@pytest.mark.usefixtures("_reads_nothing")
@pytest.mark.parametrize("exchange", [leave_behind, hand_over])
def test_layers_that_exchange_more_than_hidden_states_are_refused(exchange, llama, monkeypatch):
    forward, left = LlamaDecoderLayer.forward, {}
    changed = lambda self, *args, **kwargs: exchange(self, forward, left, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(LlamaDecoderLayer, "forward", changed)
    with pytest.raises(UnsupportedModelError, match=r"exchange more .* use --offload none"):
        llama.open(llama.recipe())


def test_a_decoder_without_one_list_of_layers_is_refused(tiny_llama):
    attention = AttentionMap({"model.layers.0.self_attn": None, "model.other": None}, {}, "model")
    with pytest.raises(UnsupportedModelError, match="not in one list of decoder layers"):
        find_layers(tiny_llama, attention)


def test_weights_shared_between_layers_are_refused(llama):
    model = llama.open(llama.recipe()).model
    layers = model.model.layers
    layers[2].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    with pytest.raises(UnsupportedModelError, match=r"layers.2.mlp.up_proj.weight' is shared"):
        plan_stages(model, list(layers), [], {}, [])


@pytest.mark.usefixtures("_reads_nothing")
def test_quantised_weights_are_refused(llama):
    edit_json(llama.path / "config.json", quantization_config={"quant_method": "hqq"})
    with pytest.raises(InputError, match=r"are quantised.*--offload none"):
        llama.open(llama.recipe())


def test_random_weights_are_one_layers_and_go_again(llama):
    model = llama.open(llama.recipe()).model
    decoder = model.get_decoder()
    one_layer = sum(p.nbytes for p in decoder.layers[0].parameters())
    assert random_bytes(decoder) == one_layer + decoder.norm.weight.nbytes
    with random_weights(decoder, torch.device("cpu")):
        first, second = (layer.mlp.up_proj.weight for layer in decoder.layers[:2])
        assert first.data_ptr() == second.data_ptr()
        assert not any(p.is_meta for p in decoder.parameters())
        assert torch.isfinite(decoder.embed_tokens.weight[:64]).all()
    assert all(p.is_meta for p in decoder.parameters())
