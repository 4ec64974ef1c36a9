"""Which modules cache K and V, who reads the text for them, and what cannot be told is refused."""

import pytest
import torch
from families import SHARED_KV, tiny_model, tiny_vision_language_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llava.modeling_llava import LlavaModel

from calib.capture.attention import _is_equal, map_attention
from calib.errors import UnsupportedModelError
from calib.scales.scales import SharedAttention


def test_the_text_backbone_of_a_vision_language_model_is_mapped():
    mapped = map_attention(tiny_vision_language_model())
    assert [*mapped.cached] == [f"model.language_model.layers.{i}.self_attn" for i in range(3)]


def test_a_layer_that_shares_kv_is_left_out_and_its_owner_named():
    mapped = map_attention(tiny_model("gemma3n_text", **SHARED_KV))
    assert [*mapped.cached] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    owner = SharedAttention(layer_idx=2, owner="model.layers.1.self_attn")
    assert mapped.shared == {"model.layers.2.self_attn": owner}


def test_latent_attention_that_caches_k_and_v_of_heads_is_refused():
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = torch.nn.Linear(16, 64)
    with pytest.raises(UnsupportedModelError, match=r"latent attention \(MLA\) of a kind .* no expand"):
        map_attention(model)


def test_a_model_that_takes_its_head_for_its_decoder_is_refused():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = AutoConfig.for_model("modernbert-decoder", num_attention_heads=2, pad_token_id=0, **sizes)
    with pytest.raises(UnsupportedModelError, match="does not say which part of it is the decoder"):
        map_attention(AutoModelForCausalLM.from_config(config))


def test_the_decoder_reads_for_a_model_that_takes_no_text_alone(monkeypatch):
    model = tiny_vision_language_model("llava", model_type="llama")
    assert map_attention(model).reader == "model"

    def forward(self, input_ids, pixel_values, **kwargs):
        raise AssertionError("an image is missing before anything runs")

    monkeypatch.setattr(LlavaModel, "forward", forward)
    assert map_attention(model).reader == "model.language_model"


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
    map_attention(model).read(model, torch.tensor([[3, 1, 4], [1, 5, 9]]))
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
    first, second = torch.randn(2, 1, 2, 3, 4)
    keys = [x.clone().as_subclass(_OnAnotherGPU) for x in (first, second)]
    assert _is_equal(keys[0], first)
    assert _is_equal(keys[1], second)
    assert not _is_equal(keys[1], first)
