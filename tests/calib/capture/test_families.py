"""What is measured of every family is what its cache holds, bit for bit, and leaves no trace."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from families import FAMILIES, LATENT, tiny_model, tiny_vision_language_model
from families_page import PAGE, known_families, read_caches
from processes import assert_as_before, held
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.models.llava.modeling_llava import LlavaModel

from calib.capture.attention import _is_equal, map_attention, observe_qkv
from calib.capture.loop import calibrate
from calib.data import Batch
from calib.errors import UnsupportedModelError
from calib.recipe import load_recipe
from calib.scales.stats import derive_scales

MASK = torch.tensor([[1] * 12, [1] * 9 + [0] * 3])
TOKENS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0)) * MASK
BATCH = Batch(TOKENS, MASK, sample_ids=(0, 1), first_token=0)
RECIPE = load_recipe(None, {"device": "cpu", "targets": "kv"})

# those that docs/models.md calls right
CALIBRATED = re.findall(r"^\| `(\S+)` \| `\w+` \| [^|]+ \| right", PAGE.read_text(), re.MULTILINE)
if transformers.__version__.startswith("5.24."):
    CALIBRATED.remove("llama4")  # which fails there as a whole: what it returns has no image_outputs
CALLS_NO_INTERFACE = "call neither transformers' attention interface nor scaled_dot_product_attention"
REFUSED = {
    "bert": "BertLMHeadModel is an encoder: its config says is_decoder false",
    "bloom": f"layers [0, 1, 2] cache K and V but {CALLS_NO_INTERFACE}, so they cannot be observed",
    "openai-gpt": "OpenAIGPTLMHeadModel hands out no KV cache in transformers",
}


def observed(model):
    """Q, K and V of each attention module, and the logits meanwhile."""
    seen = {}
    with torch.inference_mode(), observe_qkv(model, lambda name, *qkv: seen.__setitem__(name, qkv)):
        return seen, model(TOKENS, attention_mask=MASK, use_cache=False).logits


@torch.inference_mode()
def logits(model, mask=MASK):
    return model(TOKENS, attention_mask=mask, use_cache=False).logits


class QueryOracle(TorchFunctionMode):
    """Notes the query of each SDPA call, wherever it comes from."""

    def __init__(self, queries):
        super().__init__()
        self.queries = queries

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.scaled_dot_product_attention:
            self.queries.append(args[0])
        return func(*args, **(kwargs or {}))


def queries_given_to_attention(model):
    modelling, queries = sys.modules[type(model).__module__], []
    eager = getattr(modelling, "eager_attention_forward", None)

    def noting(module, query, *args, **kwargs):
        queries.append(query)
        return eager(module, query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, QueryOracle(queries):
        if eager:
            patch.setattr(modelling, "eager_attention_forward", noting)
        logits(model)
    return queries


@pytest.mark.parametrize("family", FAMILIES)
def test_q_k_and_v_are_those_of_attention_and_cache_and_nothing_is_changed(family):
    model = tiny_model(family, **FAMILIES[family])
    plain, given, before = logits(model), queries_given_to_attention(model), held(model)
    mapped = map_attention(model)
    seen, watched = observed(model)
    caches = read_caches(model, TOKENS, MASK)
    kv_heads = 4 if family == "gpt_neox" else 2
    assert [m.layer_idx for m in mapped.cached.values()] == [0, 1, 2]
    assert {(m.num_heads, m.num_kv_heads) for m in mapped.cached.values()} == {(4, kv_heads)}
    assert {m.kv_repeat for m in mapped.cached.values()} == {2 if family == "falcon" else 1}
    assert not mapped.shared
    assert len(seen) == len(caches) == len(given) == 3
    for name, (stored_key, stored_value), expected in zip(seen, caches.values(), given, strict=True):
        query, key, value = seen[name]
        assert torch.equal(query, expected)
        assert torch.equal(key, stored_key)
        assert torch.equal(value, stored_value)
        module = mapped.cached[name]
        assert (module.head_dim, module.v_head_dim) == (key.shape[3], value.shape[3])
    assert torch.equal(watched, plain)
    with pytest.raises(ZeroDivisionError), observe_qkv(model, lambda *_: 1 / 0):
        with pytest.raises(AssertionError):
            assert_as_before(model, before)
        model(TOKENS)
    assert_as_before(model, before)


@pytest.mark.parametrize("family", CALIBRATED)
def test_what_is_measured_is_what_the_cache_of_the_whole_model_holds(family):
    model = known_families()[family]()
    plain, caches = logits(model), read_caches(model, TOKENS, MASK)
    layers = calibrate(model, [BATCH], RECIPE).layers.values()
    assert len(layers) == len(caches)
    for layer in layers:
        for amax, stored in zip((layer.k.amax, layer.v.amax), caches[layer.layer_idx], strict=True):
            expected = stored.transpose(1, 2)[MASK.bool()].abs().amax(0)
            repeats = len(expected) // len(amax)  # Falcon's cache holds each KV head several times
            assert torch.equal(amax, expected[::repeats]), layer.layer_idx
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("family", LATENT)
def test_of_latent_attention_what_is_cached_is_measured_and_no_bit_changed(family):
    model = tiny_model(family, **LATENT[family])
    *others, last = (m for m in model.modules() if hasattr(m, "kv_a_proj_with_mqa"))
    with torch.no_grad():  # k_pe is larger than the latent in the last layer alone
        for attention in others:
            attention.kv_a_proj_with_mqa.weight[16:] /= 64
        last.kv_a_proj_with_mqa.weight[16:] *= 4096
    caching = list(map_attention(model).cached.values())
    caches = read_caches(model, TOKENS, MASK)
    seen, _ = observed(model)
    for module, (_, latent, k_pe) in zip(caching, seen.values(), strict=True):
        assert (module.latent, module.head_dim, module.v_head_dim) == (True, 16, 8)
        assert torch.equal(latent, caches[module.layer_idx][0])
        assert torch.equal(k_pe, caches[module.layer_idx][1])
        assert (latent.shape, k_pe.shape) == ((2, 1, 12, 16), (2, 1, 12, 8))
    stats = calibrate(model, [BATCH], RECIPE)
    larger = [bool(layer.v.amax.max() > layer.k.amax.max()) for layer in stats.layers.values()]
    assert larger == [False] * (len(larger) - 1) + [True]
    for layer in derive_scales(stats, RECIPE).layers.values():
        largest = max(x.transpose(1, 2)[MASK.bool()].abs().max() for x in caches[layer.layer_idx])
        assert layer.latent
        assert torch.equal(layer.k, layer.v)
        assert layer.k.item() == pytest.approx(largest.item() / 448, rel=1e-6)
    padded_left = MASK.flip(1)
    for implementation in ("eager",) if family == "hy_v4" else ("sdpa", "eager"):  # Hy-V4 has no SDPA
        model.set_attn_implementation(implementation)
        plain = logits(model, padded_left)
        with observe_qkv(model, lambda *_: None):
            assert torch.equal(logits(model, padded_left), plain), implementation
    assert not any("expand_kv" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_observed_is_refused(family):
    with pytest.raises(UnsupportedModelError, match=re.escape(REFUSED[family])):
        map_attention(tiny_model(family))


def test_latents_of_another_kind_and_a_model_that_takes_its_head_for_its_decoder_are_refused():
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = torch.nn.Linear(16, 64)
    with pytest.raises(UnsupportedModelError, match=r"latent attention \(MLA\) of a kind .* no expand"):
        map_attention(model)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model("modernbert-decoder", pad_token_id=0, **sizes)
    with pytest.raises(UnsupportedModelError, match="does not say which part of it is the decoder"):
        map_attention(transformers.AutoModelForCausalLM.from_config(config))


def test_the_decoder_reads_for_a_model_that_takes_no_text_alone(monkeypatch):
    model = tiny_vision_language_model("llava", model_type="llama")
    assert map_attention(model).reader == "model"

    def needing_an_image(self, input_ids, pixel_values, **kwargs):
        raise AssertionError("an image is missing before anything runs")

    monkeypatch.setattr(LlavaModel, "forward", needing_an_image)
    mapped, said = map_attention(model), "takes no text alone: "
    assert (mapped.reader, said in mapped.note) == ("model.language_model", True)

    def failing(self, input_ids, **kwargs):
        raise RuntimeError("a meta tensor, though all weights are here")

    monkeypatch.setattr(LlavaModel, "forward", failing)
    with pytest.raises(Exception, match="a meta tensor, though all weights are here"):
        map_attention(model)


def test_a_reader_with_a_head_computes_the_logits_of_one_token():
    model, shapes = tiny_model("llama4_text", intermediate_size_mlp=96, num_local_experts=2), []
    assert map_attention(model).reader == ""
    model.lm_head.register_forward_hook(lambda module, args, logits: shapes.append(logits.shape[:2]))
    map_attention(model).read(model, torch.tensor([[3, 1, 4], [1, 5, 9]]))
    assert shapes == [(1, 1), (2, 1)]


def test_keys_on_different_gpus_are_compared():
    first, second = torch.randn(2, 1, 2, 3, 4)
    # which must be moved before it is compared
    moved = SimpleNamespace(shape=second.shape, to=lambda device: second.clone())
    assert _is_equal(moved, second)
    assert not _is_equal(moved, first)
