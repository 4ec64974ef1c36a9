"""`--attention`: which engine rounds, for which caches, with the queries that it has; the report says so."""

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from command_line import SMALL, fp8kv, one_line_error
from evaluations import variants_of
from families import FAMILIES, LATENT, save_model, tiny_model

from calib.caches.types import Shape
from calib.capture.attention import cached_layers, map_attention
from calib.capture.capabilities import engine_class
from calib.capture.loop import calibrate
from calib.capture.training import scales_for
from calib.data import make_batches
from calib.errors import InputError
from calib.evaluate.attention_modes import check_model, simulate_attention
from calib.evaluate.engine_attention import HopperAdds, fa3_attention, vllm_triton_attention
from calib.evaluate.page.page import render_html, render_markdown
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.evaluate.variants import Setup, Variant, select_variants
from calib.recipe import Recipe, load_recipe
from calib.scales.stats import derive_scales
from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize, quantize
from fp8kv_runtime.hf import fp8_attention, swap_attention
from fp8kv_runtime.options import AttentionOptions

IDS = torch.randint(1, 120, (40,), generator=torch.Generator().manual_seed(0))
ATTENTION = {"fa3": fa3_attention, "vllm_triton": vllm_triton_attention}
ATTENTION |= {"vllm_triton_fp8": partial(vllm_triton_attention, dtype=None)}
ATTENTION |= {"fa3_two_level": 1, "fa3_one_level": None}  # tiles from one sum in fp32 to the next


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
def plainly(model, variant, attention, ids=IDS[None]):
    """The same without a cache of ours: K and V rounded, then the engine's formula."""
    codes = FP8_DTYPES[variant.scales.fp8_dtype]

    def rounded(x, scale):
        return dequantize(quantize(x, scale.view(-1, 1, 1), codes), scale.view(-1, 1, 1))

    def attend(original, module, query, key, value, *args, **kwargs):
        layer = variant.layers[module.layer_idx]
        columns = torch.arange(ids.shape[1])
        rows, window = columns[:, None], kwargs.get("sliding_window") or len(columns)
        visible = (columns <= rows) & (columns > rows - window)
        scale = layer.q if "q" in variant.tensors else None
        softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
        options = AttentionOptions(kwargs["scaling"], softcap=softcap, sinks=sinks, q_scale=scale)
        call = query, rounded(key, layer.k), rounded(value, layer.v), visible[None, None], options
        if attention in (1, None):
            return fa3_attention(*call, HopperAdds(layer.k, layer.v, attention)).transpose(1, 2), None
        return attention(*call).transpose(1, 2), None

    with swap_attention(model, attend):
        return model(input_ids=ids).logits


def test_a_cache_in_a_mode_is_the_engines_formula_with_the_models_windows_and_sinks(model, variants):
    for mode, name in product(ATTENTION, ("tensor", "qkv", "attn_head")):
        ids = IDS.repeat(5)[None, :140] if "level" in mode else IDS[None]  # two tiles
        want = plainly(model, variants[name], ATTENTION[mode], ids)
        assert torch.equal(logits(model, variants[name], mode, ids), want), name
        assert not torch.equal(want, logits(model, variants[name], "exact", ids)), name
    # the scores of a random model are small: a cap of 50 would not show
    for model in (make_model("gemma2", attn_logit_softcapping=0.01), make_model("gpt_oss")):
        variant = variants_of(model, IDS)["tensor"]
        torch.testing.assert_close(logits(model, variant, "fa3"), plainly(model, variant, fa3_attention))


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
        assert torch.equal(*(logits(model, variants[name], mode) for mode in ("exact", "fa3"))), name


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
    assert "'exact', 'fa3', 'fa3_two_level', 'fa3_one_level', 'vllm_triton', 'vllm_triton_fp8'" in words


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
    mine = Variant("mine", "", "given", replace(variants["tensor"].scales, fp8_dtype="e4m3fnuz"))
    queries_too = partial(vllm_triton_attention, dtype=None, fp8=torch.float8_e4m3fnuz)
    for mode, attention in (("vllm_triton", vllm_triton_attention), ("vllm_triton_fp8", queries_too)):
        assert select_variants(Setup(model, None, attention=mode), [mine], None) == ([mine], [])
        assert torch.equal(logits(model, mine, mode), plainly(model, mine, attention)), mode
    with pytest.raises(InputError, match="'mine' has e4m3fnuz codes"):
        select_variants(Setup(model, None, attention="fa3"), [mine], None)


FEW = torch.tensor([[1, 5, 81, 7, 44, 9, 3, 99, 12, 6]])
RECIPE = load_recipe(None, {"device": "cpu", "targets": "qkv", "strategy": "attn_head"})


@pytest.fixture(scope="module")
def opt():
    return tiny_model("opt", num_hidden_layers=2)


@pytest.fixture(scope="module")
def stats(opt):
    return calibrate(opt, make_batches(FEW.tolist(), 1, pad_id=0), RECIPE)


@torch.inference_mode()
def projected(model):
    """By layer, the query [1, H, T, D] before OPT multiplies it, as its class in vLLM has it."""
    made, hooks = [], []
    for module in map_attention(model).cached:
        attention = model.get_submodule(module)
        hooks.append(attention.q_proj.register_forward_hook(lambda *call: made.append(call[-1].clone())))
    model(FEW)
    for hook in hooks:
        hook.remove()
    return [q.view(1, len(FEW[0]), 4, 16).transpose(1, 2) for q in made]


@pytest.mark.parametrize(("mode", "kernel"), [("fa3", fa3_attention), ("vllm_triton", vllm_triton_attention)])
@torch.inference_mode()
def test_kernels_are_simulated_with_the_query_that_an_engine_rounds(mode, kernel, opt, stats):
    queries, calls = projected(opt), []
    attend = simulate_attention(mode, derive_scales(stats, RECIPE), with_queries=False, dtype=torch.float32)

    def compare(original, module, query, key, value, *args, **kwargs):
        found, _ = attend(original, module, query, key, value, *args, **kwargs)
        calls.append((found, key, value))
        return original(module, query, key, value, *args, **kwargs)

    with swap_attention(opt, compare):
        opt(FEW)
    visible = torch.ones(10, 10, dtype=torch.bool).tril()[None, None]
    for query, (found, key, value) in zip(queries, calls, strict=True):
        expected = kernel(query, key, value, visible, AttentionOptions(16**-0.5))
        assert torch.equal(found, expected.transpose(1, 2))


@torch.inference_mode()
def test_queries_are_measured_and_rounded_as_an_engine_does_before_the_model_scales_them(opt, stats):
    scales, queries = derive_scales(stats, RECIPE), projected(opt)
    for layer, query in zip(stats.layers.values(), queries, strict=True):
        assert torch.equal(layer.q.amax, query.abs().amax((0, 2)))  # 16 ** -0.5 is exact
    layers = {layer.layer_idx: layer for layer in scales.layers.values()}

    def logits(attend):
        with attend:
            return opt(FEW, use_cache=False).logits

    def by_hand(original, module, query, key, value, *args, **kwargs):
        layer = layers[module.layer_idx]
        q, k, v = (scale.view(-1, 1, 1) for scale in (layer.q, layer.k, layer.v))
        if module.layer_idx == 0:
            assert torch.equal(query * 4, queries[0])
        query = dequantize(quantize(query * 4, q), q) / 4
        key, value = dequantize(quantize(key, k), k), dequantize(quantize(value, v), v)
        return original(module, query, key, value, *args, **kwargs)

    expected = logits(swap_attention(opt, by_hand))
    runtime = logits(fp8_attention(opt, scales, backend="torch", quantize_query=True))
    torch.testing.assert_close(runtime, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_class_that_nothing_is_shown_of_is_refused_where_its_query_matters(tmp_path):
    model = tiny_model("bitnet", num_hidden_layers=2)
    said = "which query engines hand to attention is not known for BitNetForCausalLM"
    with pytest.raises(InputError, match=said):
        scales_for(model, [FEW], recipe=Recipe(targets="qkv"))
    shapes = [Shape(2, 32, 32, "heads")]
    # a factor that engines leave out of the query changes how FP8 rounds and cuts it off
    for mode in ("fa3", "vllm_triton_fp8"):
        with pytest.raises(InputError, match=said):
            check_model(mode, model, shapes)
    check_model("vllm_triton", model, shapes)
    save_model(model, tmp_path / "model")
    commands = (("calibrate", "--targets", "qkv", "-o", tmp_path / "out"), ("eval", "--attention", "fa3"))
    for command, *flags in commands:
        one_line_error(fp8kv(command, tmp_path / "model", *SMALL, *flags), said)
    for named, name in ((["A", "B"], "A"), ("A", "A"), ([], "other"), (None, "other")):
        assert engine_class(SimpleNamespace(architectures=named), "other") == name
