"""`--attention`: which engine rounds, for which caches, and that the report says so."""

import re
from dataclasses import replace

import pytest
import torch
from command_line import fp8kv, one_line_error
from families import FAMILIES, LATENT, save_model, tiny_model

from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.errors import InputError
from calib.evaluate.page.page import render_html, render_markdown
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.evaluate.variants import Setup, Variant, build_variants, select_variants
from calib.recipe import load_recipe
from fp8kv_runtime.engine_attention import fa3_attention, vllm_triton_attention
from fp8kv_runtime.fp8 import dequantize, quantize
from fp8kv_runtime.hf import swap_attention
from fp8kv_runtime.options import AttentionOptions

IDS = torch.randint(1, 120, (40,), generator=torch.Generator().manual_seed(0))
CHOICES = {"data.dataset": "random", "device": "cpu", "dtype": "float32"}
SMALL = Suite(3, 2, 32, 2, 5, (), (), 1)
ATTENTION = {
    "fa3": fa3_attention,
    "vllm_triton": vllm_triton_attention,
    "vllm_triton_fp8": lambda *arguments: vllm_triton_attention(*arguments, dtype=None),
}


def make_model(family="llama", **changes):
    return tiny_model(family, **{**FAMILIES[family], "head_dim": 32, **changes}).eval()


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def variants(model):
    return {variant.name: variant for variant in variants_of(model)}


def variants_of(model):
    recipe = load_recipe(None, {"means": True, "targets": "qkv", "observer.name": "mse"})
    stats = calibrate(model, make_batches([IDS.tolist()], 1, pad_id=0), recipe)
    return build_variants(stats, stats)


@torch.inference_mode()
def logits(model, variant, mode, ids=IDS[None], **inputs):
    with variant.apply(Setup(model, None, "torch", attention=mode)):
        return model(input_ids=ids, **inputs).logits


@torch.inference_mode()
def plainly(model, variant, attention, *, q=None, codes=torch.float8_e4m3fn):
    """The same without a cache of ours: K and V rounded, then the engine's formula."""
    layers = variant.layers

    def attend(original, module, query, key, value, *args, **kwargs):
        layer = layers[module.layer_idx]
        key, value = (
            dequantize(quantize(x, scale.view(-1, 1, 1), codes), scale.view(-1, 1, 1))
            for x, scale in ((key, layer.k), (value, layer.v))
        )
        rows, columns = torch.arange(40)[:, None], torch.arange(40)
        visible = columns <= rows
        if kwargs.get("sliding_window"):
            visible &= columns > rows - kwargs["sliding_window"]
        options = AttentionOptions(
            kwargs["scaling"], softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"),
            q_scale=None if q is None else layer.q,
        )  # fmt: skip
        return attention(query, key, value, visible[None, None], options).transpose(1, 2), None

    with swap_attention(model, attend):
        return model(input_ids=IDS[None]).logits


@pytest.mark.parametrize("name", ["none", "tensor", "attn_head", "qkv"])
@pytest.mark.parametrize("mode", ATTENTION)
def test_a_cache_in_a_mode_is_the_engines_formula_on_rounded_k_and_v(mode, name, model, variants):
    variant = variants[name]
    queries = "scaled" if name == "qkv" else None
    want = plainly(model, variant, ATTENTION[mode], q=queries)
    assert torch.equal(logits(model, variant, mode), want)
    assert not torch.equal(want, logits(model, variant, "exact"))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "phi3"])
def test_windows_softcaps_and_sinks_are_the_models(family):
    # the scores of a random model are small: a cap of 50 would not show
    model = make_model(family, **({"attn_logit_softcapping": 0.01} if family == "gemma2" else {}))
    variant = next(v for v in variants_of(model) if v.name == "tensor")
    want = plainly(model, variant, fa3_attention)
    torch.testing.assert_close(logits(model, variant, "fa3"), want)


def test_masks_of_float16_are_no_bias():
    model = make_model("gemma2").half()
    model.set_attn_implementation("eager")  # masks are numbers, the least -65504
    variant = next(v for v in variants_of(model) if v.name == "tensor")
    changed = IDS.clone()
    changed[-1] += 1
    found, other = (logits(model, variant, "fa3", ids=ids[None]) for ids in (IDS, changed))
    assert torch.equal(found[:, :-1], other[:, :-1])  # no one sees the last token but itself
    assert not torch.equal(found[:, -1], other[:, -1])


def test_given_scales_bring_those_of_queries(model, variants):
    scales = variants["qkv"].scales
    given = Variant("mine", "", "given", scales)
    assert torch.equal(logits(model, given, "fa3"), logits(model, variants["qkv"], "fa3"))
    assert not torch.equal(logits(model, given, "fa3"), logits(model, variants["attn_head"], "fa3"))


def test_what_is_no_fp8_cache_of_k_and_v_is_as_ever(model, variants):
    for name in ("k only", "v only", "bf16"):
        runs = (logits(model, variants[name], mode) for mode in ("exact", "fa3"))
        assert torch.equal(*runs), name


def test_left_padding_is_not_seen(model, variants):
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), IDS[None, :20]], 1)
    seen = (torch.arange(25) >= 5).long()[None]
    positions = (torch.arange(25) - 5).clamp(min=0)[None]
    inputs = {"attention_mask": seen, "position_ids": positions}
    for mode in ATTENTION:
        made = logits(model, variants["tensor"], mode, padded, **inputs)[:, 5:]
        alone = logits(model, variants["tensor"], mode, IDS[None, :20])
        assert made.isfinite().all()
        # tiles start at the padding, so that weights are rounded beside other maxima
        torch.testing.assert_close(made, alone, atol=0.05, rtol=0.05)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model(make_model(), tmp_path_factory.mktemp("modes") / "small")


@pytest.fixture(scope="module")
def reports(directory):
    def report(mode, **choices):
        recipe = load_recipe(None, {**CHOICES, "evaluation.attention": mode, **choices})
        return summarize(evaluate(str(directory), recipe, suite=SMALL))

    named = {"evaluation.variants": ["none", "tensor", "k only"]}
    return {mode: report(mode, **named) for mode in ("exact", *ATTENTION)} | {"all": report("fa3")}


def test_the_report_says_whose_attention_it_is_of(reports):
    for mode in ATTENTION:
        report = reports[mode]
        said = report.to_json()
        assert (said["attention"], said["backend"]) == (mode, "torch")
        rows = {name: row.get("attention") for name, row in said["variants"].items()}
        assert rows["none"] == rows["tensor"] == mode
        assert rows["reference"] is rows["bf16"] is None
        assert rows["k only"] is None
        for page in (render_html(report), render_markdown(report).replace("\\", "")):
            assert f"attention of {mode} simulated" in page
            assert "measured with exact attention: bf16, eager, k only" in page
    assert reports["exact"].to_json()["attention"] == "exact"
    assert "simulated" not in render_markdown(reports["exact"])


def test_every_figure_of_a_row_is_in_the_mode(reports):
    exact, fa3 = (reports[mode].variants["tensor"] for mode in ("exact", "fa3"))
    assert exact.kl.value != fa3.kl.value
    pairs = zip(exact.layers, fa3.layers, strict=True)  # queries and weights are rounded too
    assert all(a.rel_rms_layer.value < b.rel_rms_layer.value for a, b in pairs)
    for name in ("k only", "bf16", "reference"):
        same = (reports[mode].variants[name].kl.value for mode in ("exact", "fa3"))
        assert len({*same}) == 1, name


def test_caches_that_the_kernel_does_not_take_are_left_out_and_named(reports):
    report = reports["all"]
    left = {"e5m2", "channel", "channel+k_center"}
    assert left.isdisjoint(report.variants)
    assert {"none", "tensor", "mse", "attn_head", "qkv", "random"} <= report.variants.keys()
    lines = [line for line in report.warnings if line.endswith("left out")]
    assert {line.split("'")[1] for line in lines} == left
    assert any("channel, and FlashAttention 3 takes one per tensor or KV" in x for x in lines)


def test_generated_text_is_in_the_mode_too(model, variants):
    prompt = IDS[None, :8]
    written = []
    for mode in ("exact", "fa3"):
        with variants["none"].apply(Setup(model, None, attention=mode)):
            made = model.generate(
                prompt, max_new_tokens=12, do_sample=False, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        written.append(torch.stack(made.logits))
    assert written[1].isfinite().all()
    assert not torch.equal(*written)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["fa3", "--variants", "none,e5m2"], ["'e5m2'", "e5m2 codes", "takes e4m3fn"]),
        (["fa3", "--variants", "channel"], ["one scale per channel", "per tensor or KV head"]),
        (["fa3", "--variants", "channel+k_center"], ["mean subtracted from K"]),
        (["vllm_triton", "--variants", "attn_head"], ["one scale per KV head", "one per tensor"]),
        (["vllm_triton_fp8", "--variants", "qkv"], ["one scale per KV head", "one per tensor"]),
        (["fa3", "--backend", "triton"], ["plain torch", "use backend torch or auto"]),
    ],
    ids=lambda each: "-".join(each[:3]).strip("-"),
)
def test_what_is_not_simulated_is_refused_in_one_line(flags, said, directory):
    data = ("--dataset", "random", "--samples", 2, "--seq-len", 16, "--device", "cpu")
    one_line_error(fp8kv("eval", directory, *data, "--attention", *flags), *said)


def test_an_engine_that_is_not_known_is_refused(directory):
    result = fp8kv("eval", directory, "--attention", "fa2")
    assert result.exit_code == 2
    assert "'exact', 'fa3', 'vllm_triton', 'vllm_triton_fp8'" in " ".join(
        result.stderr.replace("│", " ").split()
    )


@pytest.mark.parametrize(
    ("family", "changes", "mode", "said"),
    [
        ("deepseek_v3", {}, "fa3", "caches latents (MLA)"),
        (
            "llama",
            {"head_dim": 24},
            "fa3",
            "at most 256; this model has head size 24",
        ),
        ("llama", {"head_dim": 16}, "vllm_triton", "32 or more; this model has head size 16"),
        ("falcon", {}, "fa3", "FalconForCausalLM calls attention itself"),
    ],
    ids=["latents", "fa3", "vllm_triton", "no interface"],
)
def test_a_model_that_the_kernel_does_not_take_is_refused(family, changes, mode, said, tmp_path):
    config = {**FAMILIES, **LATENT}[family]
    path = save_model(tiny_model(family, **{**config, **changes}), tmp_path / "model")
    recipe = load_recipe(None, {**CHOICES, "evaluation.attention": mode})
    with pytest.raises(InputError, match=re.escape(said)):
        evaluate(str(path), recipe, suite=SMALL)


@pytest.mark.parametrize(
    ("mode", "attention"),
    [
        ("vllm_triton", vllm_triton_attention),
        (
            "vllm_triton_fp8",
            lambda *arguments: vllm_triton_attention(*arguments, dtype=None, fp8=torch.float8_e4m3fnuz),
        ),
    ],
)
def test_codes_of_an_mi300_are_for_vllms_triton_kernel(mode, attention, model, variants):
    scales = replace(variants["tensor"].scales, fp8_dtype="e4m3fnuz")
    mine = Variant("mine", "", "given", scales)
    assert select_variants(Setup(model, None, attention=mode), [mine], None) == ([mine], [])
    want = plainly(model, mine, attention, codes=torch.float8_e4m3fnuz)
    assert torch.equal(logits(model, mine, mode), want)
    with pytest.raises(InputError, match="'mine' has e4m3fnuz codes"):
        select_variants(Setup(model, None, attention="fa3"), [mine], None)
