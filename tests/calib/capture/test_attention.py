"""What is observed is bitwise what a cache would hold, for every family, and leaves no trace."""

import sys

import pytest
import torch
from families import (
    FAMILIES,
    HYBRIDS,
    LATENT,
    SHARED_KV,
    tiny_model,
    tiny_vision_language_model,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
)

from calib.capture.attention import map_attention, observe_qkv
from calib.errors import UnsupportedModelError
from calib.scales.scales import SharedAttention

MASK = torch.tensor([[1] * 12, [1] * 9 + [0] * 3])
TOKENS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0)) * MASK


def observed(model):
    seen = {}
    sink = lambda name, q, k, v: seen.__setitem__(name, (q, k, v))  # noqa: E731
    with torch.inference_mode(), observe_qkv(model, sink):
        model.get_decoder()(input_ids=TOKENS, attention_mask=MASK, use_cache=False)
    return seen


@torch.inference_mode()
def cached(model, cache):
    model(input_ids=TOKENS, attention_mask=MASK, past_key_values=cache, use_cache=True)
    return cache


class QueryOracle(TorchFunctionMode):
    """Notes the query of each SDPA call, wherever it comes from."""

    def __init__(self):
        super().__init__()
        self.queries = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.scaled_dot_product_attention:
            self.queries.append(args[0])
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def queries_given_to_attention(model, monkeypatch):
    modelling = sys.modules[type(model).__module__]
    oracle = QueryOracle()
    if hasattr(modelling, "eager_attention_forward"):
        eager = modelling.eager_attention_forward

        def noting(module, query, *args, **kwargs):
            oracle.queries.append(query)
            return eager(module, query, *args, **kwargs)

        monkeypatch.setattr(modelling, "eager_attention_forward", noting)
    with oracle:
        model(input_ids=TOKENS, attention_mask=MASK, use_cache=False)
    return oracle.queries


@pytest.mark.parametrize("family", FAMILIES)
def test_observed_k_and_v_are_what_a_dynamic_cache_holds(family):
    model = tiny_model(family, **FAMILIES[family])
    seen = observed(model)
    layers = cached(model, DynamicCache()).layers
    assert len(seen) == len(layers) == 3
    for (_, key, value), layer in zip(seen.values(), layers, strict=True):
        assert torch.equal(key, layer.keys)
        assert torch.equal(value, layer.values)


@pytest.mark.parametrize("family", FAMILIES)
def test_observed_q_is_what_the_attention_function_is_given(family, monkeypatch):
    model = tiny_model(family, **FAMILIES[family])
    seen = [query for query, _, _ in observed(model).values()]
    given = queries_given_to_attention(model, monkeypatch)
    assert len(given) == len(seen) == 3
    assert all(torch.equal(a, b) for a, b in zip(seen, given, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_mapped_with_its_heads(family):
    model = tiny_model(family, **FAMILIES[family])
    mapped = map_attention(model)
    kv_heads = 4 if family == "gpt_neox" else 2
    assert [m.layer_idx for m in mapped.cached.values()] == [0, 1, 2]
    assert {(m.num_heads, m.num_kv_heads) for m in mapped.cached.values()} == {(4, kv_heads)}
    assert not mapped.shared


def test_falcon_repeats_its_kv_heads_and_engines_do_not():
    mapped = map_attention(tiny_model("falcon", **FAMILIES["falcon"]))
    assert {m.kv_repeat for m in mapped.cached.values()} == {2}


def test_the_text_backbone_of_a_vision_language_model_is_observed():
    model = tiny_vision_language_model()
    seen = observed(model)
    layers = cached(model, DynamicCache()).layers
    assert list(seen) == [f"model.language_model.layers.{i}.self_attn" for i in range(3)]
    for (_, key, value), layer in zip(seen.values(), layers, strict=True):
        assert torch.equal(key, layer.keys)
        assert torch.equal(value, layer.values)


@pytest.mark.parametrize("family", HYBRIDS)
def test_only_the_attention_layers_of_a_hybrid_are_mapped(family):
    model = tiny_model(family, **HYBRIDS[family])
    assert [m.layer_idx for m in map_attention(model).cached.values()] == [1]
    (_, key, value), *others = observed(model).values()
    layer = cached(model, DynamicCache(config=model.config)).layers[1]
    assert not others
    assert torch.equal(key, layer.keys)
    assert torch.equal(value, layer.values)


def test_a_layer_that_shares_kv_is_left_out_and_its_owner_named():
    mapped = map_attention(tiny_model("gemma3n_text", **SHARED_KV))
    assert list(mapped.cached) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    owner = SharedAttention(layer_idx=2, owner="model.layers.1.self_attn")
    assert mapped.shared == {"model.layers.2.self_attn": owner}


@pytest.mark.parametrize("family", LATENT)
def test_of_latent_attention_the_latent_and_k_pe_are_seen_as_they_are_cached(family):
    model = tiny_model(family, **LATENT[family])
    caching = list(map_attention(model).cached.values())
    assert all(module.latent for module in caching)
    cache = cached(model, DynamicCache(config=model.config))
    for module, (_, latent, k_pe) in zip(caching, observed(model).values(), strict=True):
        assert torch.equal(latent, cache.layers[module.layer_idx].keys)
        assert torch.equal(k_pe, cache.layers[module.layer_idx].values)
        assert (latent.shape[1:], k_pe.shape[1:]) == (
            (1, latent.shape[2], 16),
            (1, k_pe.shape[2], 8),
        )


@pytest.mark.parametrize(
    ("family", "implementation"),
    # Hy-V4 has no SDPA
    [*((f, "sdpa") for f in LATENT if f != "hy_v4"), *((f, "eager") for f in LATENT)],
)
def test_while_latents_are_watched_a_model_computes_the_same_bits(family, implementation):
    model = tiny_model(family, **LATENT[family])
    model.set_attn_implementation(implementation)
    tokens = torch.arange(3, 51).view(2, 24)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    with torch.inference_mode():
        plain = model(tokens, attention_mask=mask).logits
        with observe_qkv(model, lambda *_: None):
            watched = model(tokens, attention_mask=mask).logits
    assert torch.equal(plain, watched)
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_latent_attention_that_caches_k_and_v_of_heads_is_refused():
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = torch.nn.Linear(16, 64)
    with pytest.raises(UnsupportedModelError, match=r"latent attention \(MLA\) of a kind .* no expand"):
        map_attention(model)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("bert", "BertLMHeadModel is an encoder: its config says is_decoder false"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM hands out no KV cache in transformers"),
        ("openai-gpt", "OpenAIGPTLMHeadModel hands out no KV cache in transformers"),
    ],
)
def test_a_model_without_a_cache_is_refused(family, said):
    with pytest.raises(UnsupportedModelError, match=said):
        map_attention(tiny_model(family))


def test_a_model_that_takes_its_head_for_its_decoder():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = AutoConfig.for_model("modernbert-decoder", num_attention_heads=2, pad_token_id=0, **sizes)
    with pytest.raises(UnsupportedModelError, match="does not say which part of it is the decoder"):
        map_attention(AutoModelForCausalLM.from_config(config))


def test_attention_that_cannot_be_seen_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"layers \[0, 1, 2\] cache K and V but call"):
        map_attention(tiny_model("mpt", d_model=64, n_heads=4, n_layers=3))


def fingerprint(model):
    """Hooks, plain attributes and attention implementation of every module, and the registries."""
    return (
        [
            (
                name,
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
                module.training,
                sorted(vars(module)),
                vars(module).get("forward"),
                getattr(getattr(module, "config", None), "_attn_implementation", None),
            )
            for name, module in model.named_modules()
        ],
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
    )


class Boom(Exception):
    pass


def boom(*_):
    raise Boom


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon"])
def test_observing_leaves_no_trace(family):
    model = tiny_model(family, **FAMILIES[family])
    before = fingerprint(model)
    observed(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon"])
def test_observing_leaves_no_trace_after_an_exception(family):
    model = tiny_model(family, **FAMILIES[family])
    before = fingerprint(model)
    with pytest.raises(Boom), observe_qkv(model, boom):
        assert fingerprint(model) != before
        model(input_ids=TOKENS)
    assert fingerprint(model) == before


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "falcon", "gpt_oss"])
def test_observing_does_not_change_the_output(family):
    model = tiny_model(family, **FAMILIES[family])
    with torch.inference_mode():
        plain = model(input_ids=TOKENS, attention_mask=MASK).logits
        with observe_qkv(model, lambda *_: None):
            watched = model(input_ids=TOKENS, attention_mask=MASK).logits
    assert torch.equal(plain, watched)
