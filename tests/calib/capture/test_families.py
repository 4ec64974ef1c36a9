"""What is measured of every family is what its cache holds, bit for bit, and leaves no trace."""

import sys

import pytest
import torch
from families import FAMILIES, HYBRIDS, LATENT, SHARED_KV, tiny_model, tiny_vision_language_model
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from calib.capture.attention import map_attention, observe_qkv
from calib.capture.loop import calibrate
from calib.data import Batch
from calib.errors import UnsupportedModelError
from calib.recipe import load_recipe
from calib.scales.stats import derive_scales

MASK = torch.tensor([[1] * 12, [1] * 9 + [0] * 3])
TOKENS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0)) * MASK
BATCH = Batch(TOKENS, MASK, sample_ids=(0, 1), first_token=0)
RECIPE = load_recipe(None, {"device": "cpu", "targets": "kv"})

_WINDOW = {"sliding_window": 64}  # wider than the samples, so that the cache holds all of them
_SECTIONS = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
# whose options need no more than to be named
_PLAIN = [
    *("afmoe", "apertus", "arcee", "biogpt", "bitnet", "cohere", "ctrl", "cwm", "doge", "ernie4_5"),
    *("exaone4", "exaone_moe", "flex_olmo", "gemma", "glm", "glm4", "gpt2", "gpt_bigcode"),
    *("granitemoe", "granitemoeshared", "hyperclovax", "jais2", "lfm2", "llama4_text", "minimax_m2"),
    *("ministral3", "nanochat", "nemotron", "olmo", "olmo3", "olmoe", "opt", "persimmon", "phi"),
    *("seed_oss", "smollm3", "stablelm", "vaultgemma"),
]
OTHERS = {**HYBRIDS, "gemma3n_text": {**SHARED_KV, **_WINDOW}, **{family: {} for family in _PLAIN}}
SEEING = {
    "aya_vision": {"model_type": "cohere2", **_WINDOW},
    "gemma3": _WINDOW,
    "idefics3": {"model_type": "llama"},
    "internvl": {"model_type": "qwen2"},
    "llama4": {},
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "llama"},
    "mistral3": {"model_type": "mistral", **_WINDOW},
    "paligemma": {},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _SECTIONS),
}
CALLS_NO_INTERFACE = "call neither transformers' attention interface nor scaled_dot_product_attention"
REFUSED = {
    "bert": "BertLMHeadModel is an encoder: its config says is_decoder false",
    "bloom": CALLS_NO_INTERFACE,
    "diffllama": "changes K or V after they are cached",
    "gpt_neox_japanese": CALLS_NO_INTERFACE,
    "jetmoe": "changes K or V after they are cached",
    "mpt": f"layers [0, 1, 2] cache K and V but {CALLS_NO_INTERFACE}, so they cannot be observed",
    "openai-gpt": "OpenAIGPTLMHeadModel hands out no KV cache in transformers",
    "recurrent_gemma": "RecurrentGemmaForCausalLM hands out no KV cache in transformers",
    "xglm": CALLS_NO_INTERFACE,
}


def observed(model):
    """Q, K and V of each attention module, and the logits meanwhile."""
    seen = {}
    with torch.inference_mode(), observe_qkv(model, lambda name, *qkv: seen.__setitem__(name, qkv)):
        return seen, model(TOKENS, attention_mask=MASK, use_cache=False).logits


@torch.inference_mode()
def logits(model, mask=MASK):
    return model(TOKENS, attention_mask=mask, use_cache=False).logits


@torch.inference_mode()
def cached(model, cache):
    return model(TOKENS, attention_mask=MASK, past_key_values=cache, use_cache=True).past_key_values.layers


def wrong_layers(model, caches):
    """Layers and letters whose measured amax is not that of `caches`, and how many layers there are."""
    stats, wrong = calibrate(model, [BATCH], RECIPE), []
    for layer in stats.layers.values():
        stored = caches[layer.layer_idx]
        for letter, found, held in (("K", layer.k.amax, stored.keys), ("V", layer.v.amax, stored.values)):
            expected = held.transpose(1, 2)[MASK.bool()].abs().amax(0)
            repeats = len(expected) // len(found)  # Falcon's cache holds each KV head several times
            if not torch.equal(found, expected[::repeats]):
                wrong.append(f"{letter} of layer {layer.layer_idx}")
    return wrong, len(stats.layers)


class QueryOracle(TorchFunctionMode):
    """Notes the query of each SDPA call, wherever it comes from."""

    def __init__(self):
        super().__init__()
        self.queries = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.scaled_dot_product_attention:
            self.queries.append(args[0])
        return func(*args, **(kwargs or {}))


def queries_given_to_attention(model):
    modelling, oracle = sys.modules[type(model).__module__], QueryOracle()
    with pytest.MonkeyPatch.context() as patch, oracle:
        if hasattr(modelling, "eager_attention_forward"):
            eager = modelling.eager_attention_forward

            def noting(module, query, *args, **kwargs):
                oracle.queries.append(query)
                return eager(module, query, *args, **kwargs)

            patch.setattr(modelling, "eager_attention_forward", noting)
        logits(model)
    return oracle.queries


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


@pytest.mark.parametrize("family", FAMILIES)
def test_q_k_and_v_are_those_of_attention_and_cache_and_nothing_is_changed(family):
    model = tiny_model(family, **FAMILIES[family])
    plain, given, before = logits(model), queries_given_to_attention(model), fingerprint(model)
    mapped = map_attention(model)
    seen, watched = observed(model)
    caches = cached(model, DynamicCache())

    kv_heads = 4 if family == "gpt_neox" else 2
    assert [m.layer_idx for m in mapped.cached.values()] == [0, 1, 2]
    assert {(m.num_heads, m.num_kv_heads) for m in mapped.cached.values()} == {(4, kv_heads)}
    assert {m.kv_repeat for m in mapped.cached.values()} == {2 if family == "falcon" else 1}
    assert not mapped.shared
    assert len(seen) == len(caches) == len(given) == 3
    for name, layer, expected in zip(seen, caches, given, strict=True):
        query, key, value = seen[name]
        assert torch.equal(query, expected)
        assert torch.equal(key, layer.keys)
        assert torch.equal(value, layer.values)
        assert (mapped.cached[name].head_dim, mapped.cached[name].v_head_dim) == (
            key.shape[3],
            value.shape[3],
        )
    assert wrong_layers(model, caches) == ([], 3)
    assert torch.equal(watched, plain)
    assert torch.equal(logits(model), plain)
    assert fingerprint(model) == before


@pytest.mark.parametrize("family", [*OTHERS, *SEEING])
def test_what_is_measured_is_what_the_cache_of_the_whole_model_holds(family):
    if family in SEEING:
        model = tiny_vision_language_model(family, **SEEING[family])
    else:
        fewer = {} if "layer_types" in OTHERS[family] else {"num_hidden_layers": 2}
        model = tiny_model(family, **fewer | OTHERS[family])
    plain = logits(model)
    wrong, layers = wrong_layers(model, cached(model, None))
    assert not wrong
    assert layers == (1 if family in HYBRIDS else 3 if family in SEEING else 2)
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("family", LATENT)
def test_of_latent_attention_the_latent_and_k_pe_are_measured_as_they_are_cached(family):
    model = with_large_k_pe(tiny_model(family, **LATENT[family]))
    caching = list(map_attention(model).cached.values())
    caches = cached(model, DynamicCache(config=model.config))
    seen, _ = observed(model)
    for module, (_, latent, k_pe) in zip(caching, seen.values(), strict=True):
        assert (module.latent, module.head_dim, module.v_head_dim) == (True, 16, 8)
        assert torch.equal(latent, caches[module.layer_idx].keys)
        assert torch.equal(k_pe, caches[module.layer_idx].values)
        assert (latent.shape, k_pe.shape) == ((2, 1, 12, 16), (2, 1, 12, 8))
    stats = calibrate(model, [BATCH], RECIPE)
    larger = [bool(layer.v.amax.max() > layer.k.amax.max()) for layer in stats.layers.values()]
    assert larger == [False] * (len(larger) - 1) + [True]
    for layer in derive_scales(stats, RECIPE).layers.values():
        stored = caches[layer.layer_idx]
        largest = max(x.transpose(1, 2)[MASK.bool()].abs().max() for x in (stored.keys, stored.values))
        assert layer.latent
        assert torch.equal(layer.k, layer.v)
        assert layer.k.item() == pytest.approx(largest.item() / 448, rel=1e-6)


def with_large_k_pe(model):
    """Make k_pe larger than the latent in the last of the layers, and smaller in the others."""
    *others, last = (m for m in model.modules() if hasattr(m, "kv_a_proj_with_mqa"))
    with torch.no_grad():
        for attention in others:
            attention.kv_a_proj_with_mqa.weight[16:] /= 64
        last.kv_a_proj_with_mqa.weight[16:] *= 4096
    return model


@pytest.mark.parametrize("family", LATENT)
def test_while_latents_are_watched_a_model_computes_the_same_bits(family):
    model = tiny_model(family, **LATENT[family])
    padded_left = MASK.flip(1)
    for implementation in ("eager",) if family == "hy_v4" else ("sdpa", "eager"):  # Hy-V4 has no SDPA
        model.set_attn_implementation(implementation)
        plain = logits(model, padded_left)
        with observe_qkv(model, lambda *_: None):
            watched = logits(model, padded_left)
        assert torch.equal(plain, watched), implementation
    assert not any("expand_kv" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_nothing_is_changed_after_an_exception_either(family):
    def fail(*_):
        raise ZeroDivisionError

    model = tiny_model(family, **FAMILIES[family])
    before = fingerprint(model)
    with pytest.raises(ZeroDivisionError), observe_qkv(model, fail):
        assert fingerprint(model) != before
        model(TOKENS)
    assert fingerprint(model) == before


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_observed_is_refused(family):
    with pytest.raises(UnsupportedModelError) as refused:
        map_attention(tiny_model(family))
    assert REFUSED[family] in str(refused.value)
