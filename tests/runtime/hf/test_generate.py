"""Every family generates on the FP8 cache what it generates without a cache on rounded K and V."""

from dataclasses import replace

import pytest
import torch
from fake_quant import fake_quantized, scales_for
from families import FAMILIES, HYBRIDS, LATENT, PARALLEL, SHARED_KV, UNEVEN, mixed_model, tiny_model
from transformers import DynamicCache

from fp8kv_runtime.hf import fp8_attention, paged_cache, values_per_token

# sparse ones attend to all tokens: where indices tie, they take others with a cache than without
LATENT = {name: o | ({"index_topk": 64} if "index_topk" in o else {}) for name, o in LATENT.items()}
ALL = {**FAMILIES, **HYBRIDS, **UNEVEN, **PARALLEL, "gemma3n_text": SHARED_KV, **LATENT}
IDS = torch.tensor([[0, 0, 0, 5, 81, 7, 44, 9], [3, 99, 12, 6, 70, 8, 31, 20]])
MASK = (IDS != 0).long()
# the same float32 sums in another order
ROUNDING = 2e-5

GREEDY = {"do_sample": False}
BEAM = {"do_sample": False, "num_beams": 3, "max_new_tokens": 10, "min_new_tokens": 10}
SAMPLING = {"do_sample": True, "temperature": 1.5, "top_k": 0}
# of each kind of cache layer one family with beams: of K and V, beside other states, and with an indexer
RUNS = [(family, GREEDY) for family in ALL] + [
    (name, BEAM) for name in ("llama", "falcon_h1", "deepseek_v32")
]


def generate(model, **options):
    torch.manual_seed(3)
    return model.generate(
        input_ids=IDS,
        attention_mask=MASK,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **{"max_new_tokens": 5, "min_new_tokens": 5} | options,
    )


def share_of_equal(ours, theirs):
    """Share of the logits that are the same but for the order of sums.

    Not all of them: some processors add up a row otherwise among other rows, and a K or V that lies
    in the middle between two FP8 values then rounds to the other one.
    """
    differences = torch.cat([(a - b).abs().flatten() for a, b in zip(ours, theirs, strict=True)])
    return (differences <= ROUNDING).float().mean().item()


def expected_logits(model, scales, ids=IDS[1:], **options):
    """What the model says without a cache, attending to rounded K and V."""
    with torch.inference_mode(), fake_quantized(model, scales, **options):
        return model(ids, use_cache=False).logits


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(
    ("family", "mode"),
    [*RUNS, ("llama", SAMPLING)],
    ids=lambda x: x if isinstance(x, str) else "beam" if x is BEAM else "sampling" if x["do_sample"] else "",
)
def test_generation_is_that_of_rounded_k_and_v(family, mode):
    model = tiny_model(family, **ALL[family])
    scales = scales_for(model)
    with fake_quantized(model, scales):
        expected = generate(model, use_cache=False, **mode)
    with fp8_attention(model, scales, block_size=4):
        found = generate(model, **mode)
    assert torch.equal(found.sequences, expected.sequences)
    assert share_of_equal(found.logits, expected.logits) > 0.8
    plain = generate(model, **mode | {"max_new_tokens": 1, "min_new_tokens": 1})
    assert share_of_equal(plain.logits, expected.logits[:1]) < 0.5


@pytest.mark.parametrize("family", ["llama", "falcon", "gemma3n_text", "deepseek_v3", "deepseek_v32"])
def test_a_cache_goes_on_is_cropped_shared_by_beams_and_started_again(family):
    model = tiny_model(family, **ALL[family])
    scales, cache = scales_for(model), DynamicCache(config=model.config)
    with torch.inference_mode(), fp8_attention(model, scales, block_size=4):
        parts = [model(IDS[1:, :3], past_key_values=cache).logits]
        with torch.inference_mode(False), torch.no_grad():
            parts += [model(IDS[1:, i : i + 1], past_key_values=cache).logits for i in range(3, 8)]
        assert cache.get_seq_length() == 8
        assert paged_cache(cache).num_bytes_used == 2 * 4 * paged_cache(cache).bytes_per_token
        cache.crop(-3)
        again = model(IDS[1:, 5:], past_key_values=cache).logits
        alone = paged_cache(cache).num_bytes_used
        cache.batch_repeat_interleave(5)
        assert paged_cache(cache).num_bytes_used == alone, "beams share their prompt's blocks"
        five = model(IDS[:1, 3:4].expand(5, 1), past_key_values=cache).logits
        assert paged_cache(cache).num_bytes_used == alone + 5 * alone // 2
        cache.batch_select_indices(torch.tensor([4]))
        assert paged_cache(cache).num_bytes_used == alone + alone // 2
        cache.reset()
        assert cache.get_seq_length() == paged_cache(cache).num_bytes_used == 0
        whole = model(IDS[1:], past_key_values=cache).logits
        assert torch.equal(whole, model(IDS[1:]).logits)
    assert_close(torch.cat(parts, 1), expected_logits(model, scales))
    assert_close(again, whole[:, 5:])
    longer = expected_logits(model, scales, torch.cat([IDS[1:], IDS[:1, 3:4]], 1))
    assert_close(five, longer[:, -1:].expand_as(five))
    if family in LATENT:
        assert paged_cache(cache).bytes_per_token == len(scales.layers) * (16 + 8)


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("falcon", torch.float16)])
def test_16_bit_models_keep_their_type(family, dtype):
    model = tiny_model(family, **ALL[family]).to(dtype)
    scales = scales_for(model)
    expected = expected_logits(model.float(), scales)
    model.to(dtype)
    with torch.inference_mode(), fp8_attention(model, scales):
        logits = model(IDS[1:]).logits
    assert logits.dtype == dtype
    # the model's own 8 or 11 bits, and roundings of K and V that they tip over
    assert (logits.float() - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash", "bailing_hybrid"])
def test_a_latent_and_k_pe_are_what_attention_expands(family, monkeypatch):
    model = tiny_model(family, **LATENT[family])
    scales = scales_for(model)
    by_index = {layer.layer_idx: layer.k for layer in scales.layers.values()}

    def expand_rounded(self, latent, k_pe):
        scale = by_index[self.layer_idx]
        rounded = ((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn) for x in (latent, k_pe))
        return expand(self, *(x.float() * scale for x in rounded))

    with torch.inference_mode(), fp8_attention(model, scales, block_size=4):
        found = model(IDS[1:]).logits
    attention = type(model.get_submodule(next(iter(scales.layers))))
    expand = attention.expand_kv
    monkeypatch.setattr(attention, "expand_kv", expand_rounded)
    with torch.inference_mode():
        expected = model(IDS[1:], use_cache=False).logits
    assert_close(found, expected)


def test_latents_lie_beside_k_and_v():
    model = mixed_model()
    scales = scales_for(model, strategy="tensor")
    with torch.inference_mode(), fp8_attention(model, scales, block_size=4):
        found = model(IDS[1:])
    assert_close(found.logits, expected_logits(model, scales))
    heads, head_dim = 4, 8
    row = 2 * (16 + 8) + 2 * heads * head_dim
    assert paged_cache(found.past_key_values).bytes_per_token == row


@pytest.mark.parametrize(
    ("strategy", "fp8_dtype", "layers"), [("tensor", "e4m3fnuz", [1]), ("channel", "e5m2", [0, 1, 2])]
)
def test_other_strategies_and_formats_and_layers_without_scales(strategy, fp8_dtype, layers):
    model = tiny_model("qwen3", **FAMILIES["qwen3"])
    scales = scales_for(model, strategy=strategy, fp8_dtype=fp8_dtype)
    scales = replace(scales, layers={n: s for n, s in scales.layers.items() if s.layer_idx in layers})
    with torch.inference_mode(), fp8_attention(model, scales):
        found = model(IDS[1:])
    assert_close(found.logits, expected_logits(model, scales))
    assert list(paged_cache(found.past_key_values).layers) == layers


@pytest.mark.parametrize("family", UNEVEN)
def test_scales_of_channels_and_centred_keys_where_heads_differ_in_size(family):
    model = tiny_model(family, **UNEVEN[family])
    scales, generator = scales_for(model, strategy="channel"), torch.Generator().manual_seed(1)
    layers = {
        name: replace(each, k_center=torch.randn(each.k.shape, generator=generator))
        for name, each in scales.layers.items()
    }
    scales = replace(scales, layers=layers)
    with torch.inference_mode(), fp8_attention(model, scales, block_size=4):
        found = model(IDS[1:])
    assert_close(found.logits, expected_logits(model, scales))
    values = sum(each.k.numel() + each.v.numel() for each in layers.values())
    assert values_per_token(found.past_key_values) == values
    # V of MiMo lies in rows as wide as K's
    assert paged_cache(found.past_key_values).bytes_per_token == sum(
        2 * max(each.k.numel(), each.v.numel()) for each in layers.values()
    )


def test_queries_in_fp8():
    model = tiny_model("gpt_oss", **ALL["gpt_oss"])
    scales = scales_for(model, with_q=True)
    expected = expected_logits(model, scales, quantize_query=True)
    with torch.inference_mode():
        with fp8_attention(model, scales, quantize_query=True):
            found = model(IDS[1:]).logits
        with fp8_attention(model, scales):
            without = model(IDS[1:]).logits
    assert_close(found, expected)
    assert not torch.allclose(without, expected, rtol=0, atol=ROUNDING)


def test_a_pool_that_grows_keeps_what_it_holds():
    model = tiny_model("llama")
    scales = scales_for(model)
    with fp8_attention(model, scales):
        expected = generate(model, **GREEDY, max_new_tokens=10, min_new_tokens=10)
    with fp8_attention(model, scales, block_size=1):
        small = generate(model, **GREEDY, max_new_tokens=10, min_new_tokens=10)
    assert paged_cache(expected.past_key_values).block_size == 64
    assert paged_cache(small.past_key_values).num_blocks > len(IDS) * 16  # more than it began with
    assert torch.equal(small.sequences, expected.sequences)
    assert share_of_equal(small.logits, expected.logits) == 1
