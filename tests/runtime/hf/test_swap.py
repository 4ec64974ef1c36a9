"""Standing in for attention: calls arrive, only inside the block, only for that model."""

import pytest
import torch
from families import FAMILIES, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface, OPTConfig
from transformers.models.opt.modeling_opt import OPTAttention

from fp8kv_runtime.hf import EngineQuery, swap_attention

TOKENS = torch.arange(3, 15)[None]


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_a_replacement_sees_each_call_and_can_change_the_result(family):
    model = tiny_model(family, **FAMILIES[family])
    other = tiny_model(family, **FAMILIES[family])
    calls = []

    padded = torch.ones_like(TOKENS)
    padded[0, -2:] = 0

    def pass_on(original, module, query, key, value, *args, **kwargs):
        calls.append(module.layer_idx)
        return original(module, query, key, value, *args, **kwargs)

    def silence(original, module, query, *args, **kwargs):
        output = original(module, query, *args, **kwargs)
        is_pair = isinstance(output, tuple)
        return (torch.zeros_like(output[0]), *output[1:]) if is_pair else torch.zeros_like(output)

    with torch.inference_mode():
        plain = model(TOKENS, attention_mask=padded).logits
        with swap_attention(model, pass_on):
            swapped = model(TOKENS, attention_mask=padded).logits
            assert calls == [0, 1, 2]
            other(TOKENS)
        assert calls == [0, 1, 2], "another model was observed"
        with swap_attention(model, silence):
            silenced = model(TOKENS, attention_mask=padded).logits
        after = model(TOKENS, attention_mask=padded).logits
        unpadded = model(TOKENS).logits
    assert torch.equal(plain, swapped)
    assert torch.equal(plain, after)
    assert not torch.allclose(plain, silenced)
    assert not torch.allclose(plain, unpadded)


def test_swaps_nest_and_unwind():
    model = tiny_model("llama", num_hidden_layers=2)
    registries = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    registered = [dict(registry) for registry in registries]
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
    assert calls == ["inner", "outer"] * 2 + ["outer"] * 2
    assert [dict(registry) for registry in registries] == registered
    assert model.config._attn_implementation == "sdpa"


def test_opt_multiplies_its_query_before_attention_and_engines_do_not():
    module = OPTAttention(OPTConfig(hidden_size=64, num_attention_heads=4), layer_idx=0)
    plain = torch.randn(1, 4, 3, 16)
    for kind, query, scaling in ((module, plain / 4, 1.0), (torch.nn.Identity(), plain, 0.25)):
        engines = EngineQuery.of(kind, query, scaling)
        assert torch.equal(engines.query, plain)
        assert engines.scaling == 0.25
        assert torch.equal(engines.undo(8 * plain), 8 * query)
        assert engines.undo(engines.query) is query
