"""Tokens that fit into vLLM's KV cache; tools/engine_classes/vllm_tokens.py asks vLLM itself."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from calib.caches.types import Layers, Shape, cache_type
from calib.engines.tokens_that_fit import Pool, layer_pages, pool, vllm_pool, window_doubts
from calib.errors import InputError
from calib.evaluate.serve_commands import Offers
from calib.evaluate.variants import Variant

KINDS = ["sliding_attention"] * 5 + ["full_attention"]
FP8, K8V4, HEADS = cache_type("fp8"), cache_type("turboquant_k8v4"), Shape(2, 64, 64)


def config(kinds, window=None, **sizes):
    return SimpleNamespace(model_type="x", layer_types=kinds, sliding_window=window, **sizes)


SHAPES = dict(zip(KINDS, [Shape(8, 256, 256)] * 5 + [Shape(2, 512, 512)], strict=True))
GEMMA4 = config(KINDS * 5, 1024), Layers(dict(enumerate(SHAPES[kind] for kind in KINDS * 5)), 30)
SIZES = {"n_heads": 48, "d_head": 64, "d_state": 256, "n_groups": 1, "d_conv": 4}
MAMBA = {f"mamba_{name}": size for name, size in SIZES.items()}
FALCON = config(["hybrid"] * 24, **MAMBA), Layers(dict.fromkeys(range(24), Shape(2, 128, 128)), 24, True)


def test_published_figures():
    # vLLM #40388, Gemma 4: pools of 15.18 GiB; that 8,192 tokens are in flight is not in the thread
    for name, gib, tokens in (("fp8", 15.182, 417_022), ("fp8_per_token_head", 15.1803, 325_335)):
        size, blocks, _ = pool(layer_pages(*GEMMA4, cache_type(name), set(), "l40s"), 32_768, 8192)
        assert int(int(gib * 2**30) // size / blocks * 32_768) == tokens
    # vLLM #55196, Falcon-H1: a request has one state, without prefix caching. By default it has three
    for tokens, states, gain in ((1024, 1, 1.0), (32_768, 1, 1.84), (32_768, 3, 1.72)):
        both = [layer_pages(*FALCON, cache, set(), "h100") for cache in (FP8, None)]
        assert {page.states for pages in both for page in pages if page.kind == "state"} == {3}
        both = [[replace(page, states=page.states and states) for page in pages] for pages in both]
        fp8, full = (pool(pages, tokens, 16_384).tokens_per_gb for pages in both)
        assert fp8 / full == pytest.approx(gain, abs=0.006)


def test_layers_in_16_bits_and_what_is_not_known():
    dense, layers = config(None), Layers(dict.fromkeys(range(8), HEADS), 8)
    assert vllm_pool(dense, layers, FP8).tokens_per_gb == 10**9 // (8 * 256)
    # blocks are of 48 tokens, so that 16 in 16 bits would fit into one
    assert vllm_pool(dense, layers, K8V4, tokens=100).block_bytes == 48 * K8V4.model_bytes(layers)
    assert vllm_pool(dense, layers, FP8, in_16_bits={3}).block_bytes == 32 * (7 * 256 + 512)
    windows, mixed = config(KINDS + KINDS[:2], 64), Layers({0: HEADS}, 2, is_hybrid=True)
    blocks = 683 + 4 * (1028 + 1) + 3 * (514 + 1)
    assert vllm_pool(windows, layers, K8V4) == Pool(48 * 200, blocks, 32_768)
    # three and four layers are groups of four; blocks of UltraQuant are of 64 tokens
    few = config(KINDS[3:] + KINDS[4:] + KINDS[5:] * 2, 64), Layers(dict.fromkeys(range(7), HEADS), 7)
    assert vllm_pool(*few, FP8) == Pool(4 * 16 * 256, 2048 + 1028 + 1, 32_768)
    lfm2 = config(["full_attention", "conv"], conv_L_cache=3, hidden_size=1000)
    assert vllm_pool(lfm2, mixed, cache_type("ultraquant_4bit")).block_bytes == 64 * 136
    for *model, cache, in_16_bits, problem in (
        (dense, layers._replace(shapes={0: Shape(1, 8, 8, "sparse latents")}), FP8, {}, "an indexer"),
        (config(["odd"] * 8), layers, FP8, {}, "the pages of odd are"),
        (config(["full_attention", "conv"]), mixed, None, {}, "the size of its state"),
        (*FALCON, K8V4, {}, "some layers only attend"),
        (*GEMMA4, K8V4, {}, "that differ so"),
        (windows, layers, FP8, {5}, "of windows and of layers in 16 bits"),
    ):
        with pytest.raises(InputError, match=problem):
            vllm_pool(*model, cache, {*in_16_bits})
    assert vllm_pool(windows, layers, FP8, {0})
    for index, kind in enumerate(windows.layer_types):
        assert bool(window_doubts(windows, [index])) == (kind == "full_attention")


def test_a_batch_has_room_for_a_video_where_it_is_read_both_ways():
    text, layers = GEMMA4
    for attention, name, gpu, in_flight in (
        ("vision", "Gemma4ForConditionalGeneration", "l40s", 2 * 2496),  # 32 frames of 78 tokens
        ("vision", "Gemma4ForCausalLM", "l40s", 2 * 2048),
        (None, "Gemma4ForConditionalGeneration", "l40s", 2 * 2048),
        ("vision", "Gemma4ForConditionalGeneration", "h100", 2 * 8192),
    ):
        model = SimpleNamespace(**vars(text), use_bidirectional_attention=attention)
        whole = model if name.endswith("LM") else SimpleNamespace()
        whole.get_text_config = lambda model=model, **_: model
        offers = Offers("m", SimpleNamespace(config={"architectures": [name]}), "", whole, layers)
        expected = pool(layer_pages(text, layers, FP8, set(), gpu), 32_768, in_flight)
        assert offers.pool(Variant("fp8", "", "cache", cache="fp8"), "vllm", gpu, 32_768) == expected
