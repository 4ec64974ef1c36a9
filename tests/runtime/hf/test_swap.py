"""Standing in for attention: calls arrive, only inside the block, only for that model."""

import pytest
import torch
from families import FAMILIES, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface

from fp8kv_runtime.hf import swap_attention

TOKENS = torch.arange(3, 15)[None]


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon"])
def test_a_replacement_sees_each_call_and_its_original_gives_the_same_output(family):
    model = tiny_model(family, **FAMILIES[family])
    calls = []

    def pass_on(original, module, query, key, value, *args, **kwargs):
        calls.append(module.layer_idx)
        return original(module, query, key, value, *args, **kwargs)

    with torch.inference_mode():
        plain = model(TOKENS).logits
        with swap_attention(model, pass_on):
            swapped = model(TOKENS).logits
        after = model(TOKENS).logits
    assert calls == [0, 1, 2]
    assert torch.equal(plain, swapped)
    assert torch.equal(plain, after)


def test_a_replacement_can_change_the_result():
    model = tiny_model("llama")

    def nothing(original, module, query, key, value, *args, **kwargs):
        output, weights = original(module, query, key, value, *args, **kwargs)
        return torch.zeros_like(output), weights

    with torch.inference_mode():
        plain = model(TOKENS).logits
        with swap_attention(model, nothing):
            silenced = model(TOKENS).logits
    assert not torch.allclose(plain, silenced)


def test_other_models_are_left_alone():
    model, other = tiny_model("llama"), tiny_model("llama")
    with swap_attention(model, lambda *_, **__: pytest.fail("the wrong model was observed")):
        other(TOKENS)


def test_the_padding_mask_arrives():
    model = tiny_model("llama")
    masks = []

    def note(original, module, query, key, value, mask, **kwargs):
        masks.append(mask)
        return original(module, query, key, value, mask, **kwargs)

    padded = torch.ones_like(TOKENS)
    padded[0, -2:] = 0
    with torch.inference_mode(), swap_attention(model, note):
        model(TOKENS, attention_mask=padded)
    assert not masks[0][0, 0, -1, -1]
    assert masks[0][0, 0, -1, 0]


def test_swaps_nest_and_unwind():
    model = tiny_model("llama")
    registered = (
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
    )
    calls = []

    def noting(name):
        def note(original, module, *args, **kwargs):
            calls.append(name)
            return original(module, *args, **kwargs)

        return note

    with torch.inference_mode(), swap_attention(model, noting("outer")):
        with swap_attention(model, noting("inner")):
            model(TOKENS)
        model(TOKENS)
    assert calls == ["inner", "outer"] * 3 + ["outer"] * 3
    assert registered == (
        AttentionInterface._global_mapping,
        AttentionMaskInterface._global_mapping,
    )
    assert model.config._attn_implementation == "sdpa"
