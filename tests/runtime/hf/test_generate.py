"""Every family generates on the FP8 cache what it does without one on rounded K and V; kernels agree."""

from dataclasses import replace

import pytest
import torch
from fake_quant import fake_quantized, scales_for
from families import FAMILIES, HYBRIDS, LATENT, ONE_MODULE, PARALLEL, SHARED_KV, UNEVEN, tiny_model
from torch._dynamo.utils import counters
from transformers import DynamicCache

from fp8kv_runtime.hf import fp8_attention, paged_cache, values_per_token

# sparse ones attend to all tokens: where indices tie, they take others with a cache than without
LATENT = {name: o | ({"index_topk": 64} if "index_topk" in o else {}) for name, o in LATENT.items()}
# layers that share a block; Zamba2's own logits with its states differ from those without by 7e-4
ZAMBA = {"zamba": ONE_MODULE["zamba"]}
ALL = {**FAMILIES, **HYBRIDS, **ZAMBA, **UNEVEN, **PARALLEL, "gemma3n_text": SHARED_KV, **LATENT}
IDS = torch.tensor([[0, 0, 0, 5, 81, 7, 44, 9], [3, 99, 12, 6, 70, 8, 31, 20]])
MASK = (IDS != 0).long()
ROUNDING = 2e-5  # the same float32 sums in another order
GREEDY, LONG = {"do_sample": False}, {"max_new_tokens": 10, "min_new_tokens": 10}
BEAM = {"do_sample": False, "num_beams": 3, **LONG}
SAMPLING = {"do_sample": True, "temperature": 1.5, "top_k": 0}
RUNS = {f"{family}-greedy": (family, GREEDY, 4) for family in ALL}
# of each kind of cache layer one family: of K and V, beside other states, and with an indexer
RUNS |= {f"{family}-beam": (family, BEAM, 4) for family in ("llama", "falcon_h1", "deepseek_v32")}
# blocks of one token: more of them than the pool begins with
RUNS |= {"llama-sampling": ("llama", SAMPLING, 4), "llama-growing": ("llama", GREEDY | LONG, 1)}


def generate(model, **options):
    torch.manual_seed(3)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "output_logits": True} | options
    options |= {"attention_mask": MASK, "pad_token_id": 0, "return_dict_in_generate": True}
    return model.generate(IDS, **options)


def share_of_equal(ours, theirs):
    """Share of logits that are the same but for the order of sums, by which some K and V round otherwise."""
    differences = torch.cat([(a - b).abs().flatten() for a, b in zip(ours, theirs, strict=True)])
    return (differences <= ROUNDING).float().mean().item()


def expected_logits(model, scales, ids=IDS[1:], **options):
    """What the model says without a cache, attending to rounded K and V."""
    with torch.inference_mode(), fake_quantized(model, scales, **options):
        return model(ids, use_cache=False).logits


def assert_close(found, expected, atol=ROUNDING):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def decoded_by_layers(cache):
    """How many layers keep decoded K and V, which are what their codes say."""
    layers = [each for each in cache.layers if getattr(each, "_decoded", None) is not None]
    for each in layers:
        length, tables = each.get_seq_length(), each.rows.locate(torch.device("cpu"))[0].block_tables
        kept = each._decoded[:, :, :, :length]
        assert torch.equal(kept, each.blocks.dense(tables, length).to(kept.dtype))
    return len(layers)


def cache_after_the_same_logits(model, scales, **options):
    with torch.inference_mode(), fp8_attention(model, scales, block_size=4, **options):
        found = model(IDS[1:])
    assert_close(found.logits, expected_logits(model, scales, **options))
    return found.past_key_values


@pytest.mark.parametrize(("family", "mode", "block_size"), RUNS.values(), ids=RUNS)
def test_generation_is_that_of_rounded_k_and_v(family, mode, block_size):
    model = tiny_model(family, **ALL[family])
    scales = scales_for(model)
    with fake_quantized(model, scales):
        expected = generate(model, use_cache=False, **mode)
    with fp8_attention(model, scales, block_size=block_size):
        found = generate(model, **mode)
    began_with = 16 * len(IDS) * mode.get("num_beams", 1)
    assert paged_cache(found.past_key_values).num_blocks == began_with * (2 if block_size == 1 else 1)
    assert "num_beams" in mode or decoded_by_layers(found.past_key_values) == len(scales.layers)
    assert torch.equal(found.sequences, expected.sequences)
    assert share_of_equal(found.logits, expected.logits) > 0.8
    plain = generate(model, **mode | {"max_new_tokens": 1, "min_new_tokens": 1})
    assert share_of_equal(plain.logits, expected.logits[:1]) < 0.5


@pytest.mark.parametrize("family", ["llama", "falcon", "gemma3n_text", "deepseek_v3", "deepseek_v32"])
def test_a_cache_goes_on_is_cropped_shared_by_beams_and_started_again(family, monkeypatch):
    monkeypatch.setattr("fp8kv_runtime.hf.layers._ROOM", 2)
    model = tiny_model(family, **ALL[family])
    scales, cache = scales_for(model), DynamicCache(config=model.config)
    with torch.inference_mode(), fp8_attention(model, scales, block_size=4):
        parts = [model(IDS[1:, :3], past_key_values=cache).logits]
        assert decoded_by_layers(cache) == 0, "one pass alone needs none"
        with torch.inference_mode(False), torch.no_grad():
            parts += [model(IDS[1:, i : i + 1], past_key_values=cache).logits for i in range(3, 8)]
        assert (cache.get_seq_length(), decoded_by_layers(cache)) == (8, len(scales.layers))
        assert paged_cache(cache).num_bytes_used == 2 * 4 * paged_cache(cache).bytes_per_token
        cache.crop(-3)
        again = model(IDS[1:, 5:], past_key_values=cache).logits
        assert decoded_by_layers(cache) == len(scales.layers)
        alone = paged_cache(cache).num_bytes_used
        cache.batch_repeat_interleave(5)
        assert paged_cache(cache).num_bytes_used == alone, "beams share their prompt's blocks"
        five = model(IDS[:1, 3:4].expand(5, 1), past_key_values=cache).logits
        assert decoded_by_layers(cache) == 0, "of other rows"
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
    assert family not in LATENT or paged_cache(cache).bytes_per_token == len(scales.layers) * (16 + 8)


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("falcon", torch.float16)])
def test_16_bit_models_keep_their_type(family, dtype):
    model = tiny_model(family, **ALL[family]).to(dtype)
    scales = scales_for(model)
    expected = expected_logits(model.float(), scales)
    model.to(dtype)
    with torch.inference_mode(), fp8_attention(model, scales):
        found = model(IDS[1:])
    assert (found.logits.dtype, paged_cache(found.past_key_values).block_size) == (dtype, 64)
    # the model's own 8 or 11 bits, and roundings of K and V that they tip over
    assert (found.logits.float() - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("strategy", "fp8_dtype", "layers"), [("tensor", "e4m3fnuz", [1]), ("channel", "e5m2", [0, 1, 2])]
)
def test_other_strategies_and_formats_and_layers_without_scales(strategy, fp8_dtype, layers):
    model = tiny_model("qwen3", **FAMILIES["qwen3"])
    scales = scales_for(model, strategy=strategy, fp8_dtype=fp8_dtype)
    scales = replace(scales, layers={n: s for n, s in scales.layers.items() if s.layer_idx in layers})
    assert list(paged_cache(cache_after_the_same_logits(model, scales)).layers) == layers


@pytest.mark.parametrize("family", UNEVEN)
def test_scales_of_channels_and_centred_keys_where_heads_differ_in_size(family):
    model = tiny_model(family, **UNEVEN[family])
    scales, generator = scales_for(model, strategy="channel"), torch.Generator().manual_seed(1)
    layers = {
        name: replace(each, k_center=torch.randn(each.k.shape, generator=generator))
        for name, each in scales.layers.items()
    }
    cache = cache_after_the_same_logits(model, replace(scales, layers=layers))
    values = [(each.k.numel(), each.v.numel()) for each in layers.values()]
    assert values_per_token(cache) == sum(map(sum, values))
    # V of MiMo lies in rows as wide as K's
    assert paged_cache(cache).bytes_per_token == 2 * sum(map(max, values))


# softcap, window; own scaling; shared K, V; linear attention too; K wider than V, sinks; heads of two sizes
DIFFERENT = ("gemma2", "granite", "gemma3n_text", "qwen3_next", "mimo_v2_flash", "gemma4_text")
KERNELS = [name for name in ALL if name not in ("falcon", *LATENT, *PARALLEL)]
FAMILIES_OF_KERNELS = [n if n in DIFFERENT else pytest.param(n, marks=pytest.mark.nightly) for n in KERNELS]
SAME = 1e-5  # of the largest logit: kernels split fp32 queries in two float16 parts, 22 bits


def run(model, scales, backend, **options):
    """Logits of a padded prompt and of one more token, real tokens only."""
    ids, mask = IDS.to(model.device), MASK.to(model.device)
    with torch.inference_mode(), fp8_attention(model, scales, backend=backend, **options):
        prompt = model(ids, attention_mask=mask)
        longer, cache = torch.cat([mask, mask[:, -1:]], 1), prompt.past_key_values
        step = model(ids[:, 4:5], attention_mask=longer, past_key_values=cache)
    return torch.cat([prompt.logits[mask.bool()], step.logits[:, 0]]), cache


@pytest.mark.parametrize("family", FAMILIES_OF_KERNELS)
def test_logits_of_the_kernels_agree(family, device):
    model = tiny_model(family, **ALL[family]).to(device)
    scales = scales_for(model)
    expected, theirs = run(model, scales, "torch", block_size=4)
    found, ours = run(model, scales, "triton", block_size=4)
    assert_close(found, expected, SAME * max(1, float(expected.abs().max())))
    assert paged_cache(ours).num_bytes_used == paged_cache(theirs).num_bytes_used


def test_fp8_queries_and_additive_masks_of_eager_attention_agree(device):
    model = tiny_model("gpt_oss", **ALL["gpt_oss"])
    model.set_attn_implementation("eager")
    scales = scales_for(model, with_q=True)
    cache_after_the_same_logits(model, scales, quantize_query=True)
    model.to(device)
    expected, _ = run(model, scales, "torch", quantize_query=True)
    found, _ = run(model, scales, "triton", quantize_query=True)
    without, _ = run(model, scales, "torch")
    assert_close(found, expected, SAME)
    assert not torch.allclose(without, expected, rtol=0, atol=SAME)


def greedy(call, cache, ids, mask):
    """Logits of a prompt's last token and of one more."""
    logits = []
    for _ in range(2):
        logits.append(call(ids, past_key_values=cache, attention_mask=mask).logits[:, -1])
        ids = logits[-1].argmax(-1)[:, None]
        mask = None if mask is None else torch.cat([mask, mask[:, -1:]], 1)
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("family", "backend", "mask"),
    [("gemma2", "torch", MASK), ("deepseek_v3", "torch", None), ("llama", "triton", MASK)],
)
def test_a_compiled_model_says_the_same(family, backend, mask, monkeypatch):
    """What surrounds the decoder is compiled."""
    monkeypatch.undo()  # torch.compile cannot trace what stands in for `torch.empty`
    model = tiny_model(family, **ALL[family], num_hidden_layers=2)
    ids, caches = IDS if mask is not None else IDS[1:], [DynamicCache(config=model.config) for _ in "ab"]
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), fp8_attention(model, scales_for(model), backend=backend, block_size=4):
        expected = greedy(model, caches[0], ids, mask)
        found = greedy(compiled, caches[1], ids, mask)
    assert torch.equal(found, expected)
    assert counters["stats"]["unique_graphs"] > 0
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])
