"""`--attention`: which engine rounds, for which caches, and that the report says so."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from command_line import SMALL, fp8kv, one_line_error
from evaluations import variants_of
from families import FAMILIES, LATENT, save_model, tiny_model

from calib.capture.attention import cached_layers
from calib.errors import InputError
from calib.evaluate.attention_modes import check_model
from calib.evaluate.page.page import render_html, render_markdown
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.evaluate.variants import Setup, Variant, select_variants
from calib.recipe import load_recipe
from fp8kv_runtime.engine_attention import fa3_attention, vllm_triton_attention
from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize, quantize
from fp8kv_runtime.hf import swap_attention
from fp8kv_runtime.options import AttentionOptions

IDS = torch.randint(1, 120, (40,), generator=torch.Generator().manual_seed(0))
ATTENTION = {"fa3": fa3_attention, "vllm_triton": vllm_triton_attention}
ATTENTION |= {"vllm_triton_fp8": partial(vllm_triton_attention, dtype=None)}


def make_model(family="llama", **changes):
    return tiny_model(family, **FAMILIES[family] | {"head_dim": 32} | changes).eval()


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def variants(model):
    return variants_of(model, IDS)


@torch.inference_mode()
def logits(model, variant, mode, ids=IDS[None], **inputs):
    with variant.apply(Setup(model, None, "torch", attention=mode)):
        return model(input_ids=ids, **inputs).logits


@torch.inference_mode()
def plainly(model, variant, attention):
    """The same without a cache of ours: K and V rounded, then the engine's formula."""
    codes = FP8_DTYPES[variant.scales.fp8_dtype]

    def rounded(x, scale):
        return dequantize(quantize(x, scale.view(-1, 1, 1), codes), scale.view(-1, 1, 1))

    def attend(original, module, query, key, value, *args, **kwargs):
        layer = variant.layers[module.layer_idx]
        rows, columns = torch.arange(40)[:, None], torch.arange(40)
        visible = (columns <= rows) & (columns > rows - (kwargs.get("sliding_window") or 40))
        scale = layer.q if "q" in variant.tensors else None
        softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
        options = AttentionOptions(kwargs["scaling"], softcap=softcap, sinks=sinks, q_scale=scale)
        pair = rounded(key, layer.k), rounded(value, layer.v)
        return attention(query, *pair, visible[None, None], options).transpose(1, 2), None

    with swap_attention(model, attend):
        return model(input_ids=IDS[None]).logits


def test_a_cache_in_a_mode_is_the_engines_formula_with_the_models_windows_and_sinks(model, variants):
    for mode, name in product(ATTENTION, ("tensor", "qkv", "attn_head")):
        want = plainly(model, variants[name], ATTENTION[mode])
        assert torch.equal(logits(model, variants[name], mode), want), name
        assert not torch.equal(want, logits(model, variants[name], "exact")), name
    # the scores of a random model are small: a cap of 50 would not show
    for model in (make_model("gemma2", attn_logit_softcapping=0.01), make_model("gpt_oss")):
        variant = variants_of(model, IDS)["tensor"]
        want = plainly(model, variant, fa3_attention)
        torch.testing.assert_close(logits(model, variant, "fa3"), want)


def test_masks_of_float16_are_no_bias():
    model = make_model("gemma2").half()
    model.set_attn_implementation("eager")  # masks are numbers, the least -65504
    variant, changed = variants_of(model, IDS)["tensor"], IDS.clone()
    changed[-1] += 1
    found, other = (logits(model, variant, "fa3", ids=ids[None]) for ids in (IDS, changed))
    assert torch.equal(found[:, :-1], other[:, :-1])  # no one sees the last token but itself
    assert not torch.equal(found[:, -1], other[:, -1])


def test_given_scales_bring_those_of_queries_and_half_a_cache_is_as_ever(model, variants):
    given = logits(model, Variant("mine", "", "given", variants["qkv"].scales), "fa3")
    assert torch.equal(given, logits(model, variants["qkv"], "fa3"))
    assert not torch.equal(given, logits(model, variants["attn_head"], "fa3"))
    for name in ("k only", "v only", "bf16"):
        runs = (logits(model, variants[name], mode) for mode in ("exact", "fa3"))
        assert torch.equal(*runs), name


def test_left_padding_is_not_seen(model, variants):
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), IDS[None, :20]], 1)
    positions = (torch.arange(25) - 5)[None]
    inputs = {"attention_mask": (positions >= 0).long(), "position_ids": positions.clamp(min=0)}
    for mode in ATTENTION:
        made = logits(model, variants["tensor"], mode, padded, **inputs)[:, 5:]
        alone = logits(model, variants["tensor"], mode, IDS[None, :20])
        assert made.isfinite().all()
        # tiles start at the padding, so that weights are rounded beside other maxima
        torch.testing.assert_close(made, alone, atol=0.05, rtol=0.05)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model(make_model(), tmp_path_factory.mktemp("modes") / "small")


def test_the_report_says_whose_attention_every_figure_is_of(directory):
    def report(mode, *names):
        asked = {"data.dataset": "random", "device": "cpu", "dtype": "float32", "evaluation.attention": mode}
        recipe = load_recipe(None, asked | {"evaluation.variants": names or None})
        return summarize(evaluate(str(directory), recipe, suite=Suite(3, 2, 32, 2, 5, (), (), 1)))

    exact, fa3 = report("exact", "tensor", "k only", "attn_head", "qkv"), report("fa3")
    said = fa3.to_json()
    assert (said["attention"], said["backend"]) == ("fa3", "torch")
    rows = {name: row.get("attention") for name, row in said["variants"].items()}
    assert rows["none"] == rows["tensor"] == "fa3"
    assert rows["reference"] is rows["bf16"] is rows["k only"] is None
    for page in (render_html(fa3), render_markdown(fa3).replace("\\", "")):
        assert "attention of fa3 simulated" in page
        assert "measured with exact attention: bf16, eager, k only, v only" in page
    assert exact.to_json()["attention"] == "exact"
    assert "simulated" not in render_markdown(exact)
    assert exact.variants["tensor"].kl.value != fa3.variants["tensor"].kl.value
    plain, queries_too = (exact.variants[name] for name in ("attn_head", "qkv"))
    # queries and weights are rounded too
    for row, rounded in ((exact.variants["tensor"], fa3.variants["tensor"]), (plain, queries_too)):
        for a, b in zip(row.layers, rounded.layers, strict=True):
            assert a.rel_rms_layer.value < b.rel_rms_layer.value
    for name in ("k only", "bf16", "reference"):
        assert exact.variants[name].kl.value == fa3.variants[name].kl.value, name
    # caches that the kernel does not take are left out and named
    left = {"e5m2", "channel", "channel+k_center"}
    assert left.isdisjoint(fa3.variants)
    assert {"none", "tensor", "mse", "attn_head", "qkv", "random"} <= fa3.variants.keys()
    lines = [line for line in fa3.warnings if line.endswith("left out")]
    assert {line.split("'")[1] for line in lines} == left
    assert any("channel, and FlashAttention 3 takes one per tensor or KV" in x for x in lines)


def test_a_cache_that_was_asked_for_and_is_not_simulated_is_refused(model, variants, directory):
    for mode, name, said in (
        ("fa3", "e5m2", "'e5m2' has e5m2 codes, .* takes e4m3fn"),
        ("fa3", "channel", "one scale per channel, .* per tensor or KV head"),
        ("fa3", "channel+k_center", "mean subtracted from K"),
        ("vllm_triton", "attn_head", "one scale per KV head, .* one per tensor"),
        ("vllm_triton_fp8", "qkv", "one scale per KV head, .* one per tensor"),
    ):
        with pytest.raises(InputError, match=said):
            select_variants(Setup(model, None, attention=mode), [*variants.values()], [name])
    done = fp8kv("eval", directory, *SMALL, "--attention", "fa3", "--variants", "none,e5m2")
    one_line_error(done, "'e5m2'", "takes e4m3fn")
    done = fp8kv("eval", directory, *SMALL, "--attention", "fa3", "--backend", "triton")
    one_line_error(done, "plain torch", "torch or auto")
    done = fp8kv("eval", directory, "--attention", "fa2")
    assert done.exit_code == 2
    words = " ".join(done.stderr.replace("│", " ").split())
    assert "'exact', 'fa3', 'vllm_triton', 'vllm_triton_fp8'" in words


def test_a_model_that_the_kernel_does_not_take_is_refused():
    for family, changes, mode, said in (
        ("deepseek_v3", {}, "fa3", r"caches latents \(MLA\)"),
        ("llama", {"head_dim": 24}, "fa3", "at most 256; this model has head size 24"),
        ("llama", {"head_dim": 16}, "vllm_triton", "32 or more; this model has head size 16"),
        ("falcon", {}, "fa3", "FalconForCausalLM calls attention itself"),
    ):
        model = tiny_model(family, **(FAMILIES | LATENT)[family] | changes)
        with pytest.raises(InputError, match=said):
            check_model(mode, model, [*cached_layers(model).shapes.values()])


def test_codes_of_an_mi300_are_for_vllms_triton_kernel(model, variants):
    scales = replace(variants["tensor"].scales, fp8_dtype="e4m3fnuz")
    mine = Variant("mine", "", "given", scales)
    queries_too = partial(vllm_triton_attention, dtype=None, fp8=torch.float8_e4m3fnuz)
    for mode, attention in (("vllm_triton", vllm_triton_attention), ("vllm_triton_fp8", queries_too)):
        assert select_variants(Setup(model, None, attention=mode), [mine], None) == ([mine], [])
        assert torch.equal(logits(model, mine, mode), plainly(model, mine, attention)), mode
    with pytest.raises(InputError, match="'mine' has e4m3fnuz codes"):
        select_variants(Setup(model, None, attention="fa3"), [mine], None)
