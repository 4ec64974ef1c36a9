"""Caches of other types than static FP8: their rows, who serves them, and which one is recommended."""

import json
import os
import re
import shlex
import signal
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from baking import bake
from command_line import calibrate, fp8kv, one_line_error, ran, succeeded
from evaluations import caches_recipe, plain_comparison, plain_inputs
from families import LATENT, save_model, tiny_model
from safetensors.torch import load_file

from calib.caches.rounding import rounding
from calib.caches.types import CACHES, LATENT_CACHES, Layers, Shape, cache_type
from calib.capture.resume import SavedProgress, progress_file
from calib.choices import REFERENCE
from calib.engines.cache_support import NotServed, Offer
from calib.engines.tokens_that_fit import Pool
from calib.errors import InputError
from calib.evaluate.cache_variants import cache_names, select_types
from calib.evaluate.measure import VariantResults
from calib.evaluate.page.charts import charts
from calib.evaluate.recommend import Wish, advised_cache, answer_lines, make_wish, recommend
from calib.evaluate.report import Row, Suite
from calib.evaluate.run import evaluate
from calib.evaluate.serve_commands import Offers
from calib.evaluate.statistics import Divergence, estimate
from calib.evaluate.summarize import summarize
from calib.evaluate.variants import Variant
from calib.evaluate.verdict import Judgement
from calib.job import run as calibrate_model
from calib.models.sources import find_model
from calib.recipe import load_recipe
from fp8kv_runtime.hf import is_latent, swap_attention

pytestmark = pytest.mark.xdist_group("caches")
SMALL = Suite(4, 3, 32, 0, 0, (), (), 2)
FLAGS = ("--dataset", "random", "--samples", "8", "--seq-len", "16", "--device", "cpu")


def latent_directory(family, parent, **sizes):
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2, **sizes}
    model = tiny_model(family, **LATENT[family] | sizes)
    for module in filter(is_latent, model.modules()):
        # small latents, as FP8 at scale 1.0 does not hold them; the model's function stays
        module.kv_a_layernorm.weight.data *= 2.0**-7
        module.kv_b_proj.weight.data *= 2.0**7
    return save_model(model, parent / family)


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """Of a model that caches latents (MLA)."""
    path = latent_directory("deepseek_v3", tmp_path_factory.mktemp("model"))
    return evaluate(str(path), caches_recipe("none", "tensor"), suite=SMALL)


def test_simulated_baking_is_the_baked_model(caches_evaluation, caches_directory, tmp_path):
    scales = tmp_path / "scales"  # the samples that the evaluation calibrates on
    succeeded(calibrate(caches_directory, "-o", scales, "--dtype", "float32", "--format", "fp8kv"))
    integers = ["int8_per_token_head", "int4_per_token_head", "lmdeploy_int8"]
    for purpose, names in (("fp8", ["none"]), ("int8", integers)):
        succeeded(bake(caches_directory, scales, tmp_path / purpose, "--for", purpose))
        found = evaluate(str(tmp_path / purpose), caches_recipe("none"), suite=SMALL).measured
        assert not any(each.variant.is_baked for each in found.values())
        # the FP8 cache of our runtime hands attention a copy of K and V, laid out otherwise
        near = {"rtol": 1e-3, "atol": 1e-7} if purpose == "fp8" else {"rtol": 0, "atol": 0}
        for name in names:
            simulated = caches_evaluation.measured[f"{'fp8' if name == 'none' else name}, baked"].documents
            plain = caches_evaluation.measured[name].documents
            for ours, theirs, other in zip(simulated, found[name].documents, plain, strict=True):
                torch.testing.assert_close(ours.kl, theirs.kl, **near)
                torch.testing.assert_close(ours.nll, theirs.nll, **near)
                assert not torch.allclose(ours.kl, other.kl, **near)


def test_a_cache_is_the_rounding_of_what_it_holds(caches_evaluation, evaluation):
    # rounded as the checkpoint is
    for of, names, dtype in ((caches_evaluation, CACHES, torch.bfloat16), (evaluation, LATENT_CACHES, None)):
        model, documents = plain_inputs(of)
        for name in names:
            rounded = rounding(name, of.layers, dtype)

            def attend(original, module, query, *pair, rounded=rounded, **kwargs):
                return original(module, query, *rounded(module.layer_idx, *pair[:2]), *pair[2:], **kwargs)

            for ids, found in zip(documents, of.measured[name].documents, strict=True):
                kl, _ = plain_comparison(model, swap_attention(model, attend), ids)
                # the logits are float32's
                torch.testing.assert_close(found.kl.double(), kl, rtol=0.02, atol=1e-8)
                assert kl.max() > 1e-7, name


def of_layers(size, count=1):
    return Layers(dict.fromkeys(range(count), Shape(2, size, size)), count)


def test_bytes_have_all_overhead_and_each_cache_writes_text(caches_evaluation, caches_report, evaluation):
    rows, layers = caches_report.to_json()["variants"], of_layers(32, 3)
    fp8 = 3 * 2 * (32 + 32)
    sizes = dict.fromkeys(("none", "tensor", "attn_head", "fp8, baked"), fp8) | {"reference": 2 * fp8}
    sizes |= {name: cache_type(name).model_bytes(layers) for name in CACHES}
    assert {name: rows[name]["bytes_per_token"] for name in sizes} == sizes
    assert [name for name in CACHES if sizes[name] == fp8] == ["fp8_e5m2"]
    assert "bytes_per_token" not in rows["bf16"]
    description = caches_evaluation.measured["turboquant_k8v4"].variant.description
    assert description.endswith("; layers 0, 2 in 16 bits")
    baked = rows["int8_per_token_head, baked"]
    assert (baked["is_baked"], baked["cache"]) == (True, "int8_per_token_head")
    for name in (*CACHES, "fp8, baked"):
        assert len(caches_evaluation.measured[name].same_tokens) == 2
    sizes = {"reference": 1152, "none": 576, "tensor": 576, "fp8, baked": 576}
    sizes |= zip(LATENT_CACHES, (656, 352), strict=True)
    found = {name: row.bytes_per_token for name, row in summarize(evaluation).variants.items()}
    assert found == {name: 2 * size for name, size in sizes.items()} | {"bf16": None, "eager": None}
    assert any("types for K and V of heads are left out" in each for each in evaluation.warnings)


def test_names_are_the_types_that_head_sizes_allow_and_those_that_can_be_gated():
    assert select_types(["all"], of_layers(64)) == ([cache_type(name) for name in CACHES], [])
    assert cache_names(["fp8", "nvfp4"]) == ["nvfp4", "fp8, baked"]
    assert cache_names(["int8_per_token_head"])[1:] == ["int8_per_token_head, baked"]
    assert set(CACHES) < set(cache_names(["all"]))
    for dims in (24, 40):
        with pytest.raises(InputError, match=rf"nvfp4: head size {dims} .*leave it out of --caches"):
            select_types(["fp8", "nvfp4"], of_layers(dims))
        types, warnings = select_types(["all"], of_layers(dims))
        blocks = ("nvfp4", "_nc", "mx", "quant_4bit", "lmdeploy_turbo")
        assert [kind.name for kind in types] == [n for n in CACHES if not any(x in n for x in blocks)]
        assert len(warnings) == len(CACHES) - len(types)
        assert all(str(dims) in warning for warning in warnings)


def test_a_type_that_leaves_every_layer_of_a_small_model_in_16_bits_says_so():
    names = ["turboquant_k8v4", "ultraquant_4bit", "nvfp4"]
    said = [warning.split(" quantises nothing")[0] for warning in select_types(names, of_layers(64, 4))[1]]
    assert said == names[:2]
    assert select_types(names, of_layers(64, 5))[1] == []


def test_what_bake_refuses_has_no_baked_rows(tmp_path):
    directory = save_model(tiny_model("olmo", clip_qkv=0.5), tmp_path / "olmo")
    evaluation = evaluate(str(directory), caches_recipe("none"), suite=SMALL)
    assert not any(m.variant.is_baked for m in evaluation.measured.values())
    warnings = [w.partition(":")[0] for w in evaluation.warnings if "clips Q, K and V" in w]
    assert warnings == [f"no rows on weights baked for {purpose}" for purpose in ("fp8", "int8")]


def answers(evaluation, offers=None, *, engine=None, gpu=None):
    """Commands that serve each variant, or why none does."""
    found = {}
    for name, each in evaluation.measured.items():
        if each.variant.kind != "control":
            try:
                found[name] = (offers or evaluation.offers).find(each.variant, engine, gpu).commands
            except NotServed as error:
                found[name] = str(error)
    return found


def test_latents_are_served_at_scale_1_and_never_with_scales(evaluation, tmp_path):
    found = answers(evaluation, engine="vllm", gpu="h100")
    assert found["none"] == (f"vllm serve {evaluation.model_name} --kv-cache-dtype fp8",)
    *_, bake_command, serve = found["fp8, baked"]
    assert bake_command.startswith(f"fp8kv bake {evaluation.model_name} ")
    assert (serve.split()[0], serve.split()[-2:]) == ("vllm", ["--kv-cache-dtype", "fp8"])
    documents = (evaluation.measured[name].documents for name in ("fp8, baked", "none"))
    assert all(baked.kl.mean() < plain.kl.mean() / 2 for baked, plain in zip(*documents, strict=True))
    for engine in (None, "vllm", "sglang", "lmdeploy"):
        assert "no engine stores latents with scales" in answers(evaluation, engine=engine)["tensor"]
    (served,) = answers(evaluation, engine="sglang")["none"]
    assert served.endswith("--kv-cache-dtype fp8_e4m3")
    assert "not on a100" in answers(evaluation, gpu="a100")["none"]
    assert "not for latents" in answers(evaluation, engine="lmdeploy")["none"]
    for name in LATENT_CACHES:
        assert "for sparse latents" in found[name]
        assert found[name].endswith("not for latents")
    # a model whose K and V vLLM caches
    other = find_model(str(latent_directory("minicpm3", tmp_path)))
    offers = Offers("m", other, "random", None, evaluation.layers)
    refusal = "vllm: not known to cache latents of minicpm3 models"
    assert answers(evaluation, offers, engine="vllm")["none"] == refusal
    assert answers(evaluation, offers)["none"][-1].startswith("python -m sglang")


def test_sparse_latents_are_served_in_tiles_of_their_size(evaluation, tmp_path):
    # an indexer chooses the tokens to attend to
    path = latent_directory("deepseek_v32", tmp_path, index_head_dim=80)
    sparse = evaluate(str(path), caches_recipe("none"), suite=SMALL)
    assert [*sparse.layers.shapes.values()] == [Shape(1, 512, 64, "sparse latents")] * 2
    assert all(sparse.measured[name].documents[0].kl.mean() > 0 for name in LATENT_CACHES)
    for gpu, blocks in (("h100", str), ("b200", tuple)):
        found = answers(evaluation, sparse.offers, engine="vllm", gpu=gpu)
        assert found["fp8_ds_mla"][-1].endswith("--kv-cache-dtype fp8_ds_mla")
        assert isinstance(found["nvfp4_ds_mla"], blocks)
    assert "--attention-backend" in found["none"][-1]
    assert "not on h100" in answers(evaluation, sparse.offers, engine="vllm", gpu="h100")["none"]
    small = replace(sparse.offers, layers=Layers({0: Shape(1, 144, 24, "sparse latents")}, 1))
    refusal = answers(evaluation, small)["fp8_ds_mla"]
    assert "with latents of 512 + 64 (vllm, sglang, lmdeploy), not of 144 + 24" in refusal
    rows = summarize(evaluation).variants  # the recommendation is one of them
    judgement = Judgement(evaluation.measured, rows)
    found = recommend(judgement, sparse.offers, Wish(kl=10.0, gpu="b200"))
    assert (found.chosen.cache, found.chosen.share) == ("nvfp4_ds_mla", 352 / 1152)
    assert "no engine stores latents" in found.not_served["tensor"]
    found = recommend(judgement, sparse.offers, Wish(kl=rows["fp8_ds_mla"].kl.high, gpu="h100"))
    assert found.chosen.cache == "fp8_ds_mla"


def test_every_way_to_have_one_scale_has_a_row_that_counts_latent_and_k_pe(tmp_path):
    # latents beyond FP8 at scale 1.0 in the second layer, and such k_pe in the third
    model = tiny_model("deepseek_v3", **LATENT["deepseek_v3"])
    with torch.no_grad():
        model.model.layers[1].self_attn.kv_a_layernorm.weight *= 2**14
        model.model.layers[1].self_attn.kv_b_proj.weight /= 2**14
        model.model.layers[2].self_attn.kv_a_proj_with_mqa.weight[16:] *= 2**14
    recipe = load_recipe(None, {"data.dataset": "random", "device": "cpu", "dtype": "float32"})
    report = summarize(evaluate(str(save_model(model, tmp_path / "latent")), recipe, suite=SMALL)).to_json()
    rows = report["variants"]
    assert {"none", "tensor", "mse", "e5m2", "k only", "v only", "random"} <= rows.keys()
    assert not {"attn_head", "channel", "qkv", "channel+k_center"} & rows.keys()
    assert rows["tensor"]["kl"]["value"] < rows["none"]["kl"]["value"] / 2
    assert report["advice"][0].startswith("Engines' own classes use no scales of latents")
    assert any("K stands for the latent, V for k_pe" in line for line in report["warnings"])
    assert report["bytes_per_token"] == {"fp8": 3 * (16 + 8), "16bit": 6 * (16 + 8)}
    _, second, third = rows["none"]["layers"]
    for none, tensor in zip((second, third), rows["tensor"]["layers"][1:], strict=True):
        assert all(map(float.__lt__, tensor["rel_rms"], none["rel_rms"]))
    assert second["saturated"]["k"][0] > 0.5
    assert (second["saturated"]["v"], third["saturated"]["k"]) == ([0.0], [0.0])
    assert third["saturated"]["v"][0] > 0.9  # of its 8 values; the latent has 16
    for row in rows["tensor"]["layers"]:
        assert row["scale"]["k"] == row["scale"]["v"]
        assert len(row["rel_rms"]) == 4


def test_the_command_line(caches_directory, evaluation, small_directory, tmp_path, monkeypatch):
    directory, out, caches = evaluation.model_name, tmp_path / "report", "int8_per_token_head,nvfp4"
    gate = ("--variants", "none", "--fail-if", "int8_per_token_head:kl>0")
    done = fp8kv("eval", caches_directory, "--caches", caches, *FLAGS, "-o", out, *gate)
    assert done.exit_code == 1, done.stderr
    assert "int8_per_token_head: kl is" in done.stderr
    report = json.loads((out / "report.json").read_text())
    kinds = {name: row["kind"] for name, row in report["variants"].items()}
    assert kinds["nvfp4"] == kinds["int8_per_token_head, baked"] == "cache"
    assert "tensor" not in kinds
    flags = ("--cache", "fp8_ds_mla", "--max-new-tokens", "3", "--device", "cpu", "--json")
    facts = json.loads(ran("generate", directory, "some text", *flags).stdout)
    assert (facts["bytes_per_token"], facts["bytes_per_token_16bit"]) == (2 * 656, 2 * 1152)
    answer = json.loads(ran("recommend", directory, *FLAGS, "--engine", "vllm", "--json").stdout)
    assert ("fp8_ds_mla" in answer["not_served"], answer["evidence"]["octave_k3v4"]) == (True, "none")
    done = fp8kv("eval", directory, *FLAGS, "--caches", "int8_per_token_head")
    one_line_error(done, "int8_per_token_head holds K and V of heads", "caches latents", "--caches")
    done = fp8kv("eval", small_directory, *FLAGS, "--caches", "fp8_ds_mla")
    one_line_error(done, "fp8_ds_mla holds latents (MLA)", "K and V of heads")
    done = fp8kv("generate", directory, "a", "--cache", "nvfp4", "--device", "cpu")
    one_line_error(done, "nvfp4 holds K and V of heads", "latents (MLA)")
    done = fp8kv("eval", directory, *FLAGS, "--variants", "attn_head")
    one_line_error(done, "attn_head: this model caches latents")
    monkeypatch.setattr("calib.evaluate.run.find_model", lambda _: pytest.fail("measured"))
    done = fp8kv("eval", caches_directory, "--caches", "int9", *FLAGS)
    one_line_error(done, "--caches should be 'all', 'fp8'", "got 'int9'")
    for name in ("nvfp4, baked", "fp8"):
        done = fp8kv("eval", caches_directory, "--caches", "fp8,nvfp4", "--fail-if", f"{name}:kl>1")
        one_line_error(done, f"'{name}'")


OFFER = Offer("vllm", "1", ("h100",), commands=("x",))
NOISE = torch.rand(4, 50, generator=torch.Generator().manual_seed(0))


def figures(name, kl, size, *, kind="cache", baked=False, noise=NOISE):
    """A variant with KL of about `kl` in every one of four documents."""
    documents = [Divergence(kl * (0.9 + 0.2 * row), None, None) for row in noise]
    row = Row.model_construct(
        description=name, kind=kind, is_baked=baked, bytes_per_token=size, measurable=True,
        kl=estimate([each.kl.double().numpy() for each in documents]),
    )  # fmt: skip
    return name, VariantResults(Variant(name, name, kind), documents), row


def chosen(variants, fits=(), gpus=OFFER.gpus, **wish):
    """The choice where requests of 1000 tokens take these bytes, by the name of a variant, or with a GPU."""
    offer = replace(OFFER, gpus=gpus)
    anywhere = SimpleNamespace(find=lambda *_: offer, request_tokens=lambda tokens: tokens or 7)
    pools = {name: Pool(size, 1, 1000) for name, size in dict(fits).items()}
    anywhere.pool = lambda of, _, gpu, *__: pools.get(of.name) or pools.get((of.name, gpu))
    all_of = [figures(REFERENCE, 0.0, 200, kind=REFERENCE), *variants]
    measured = {name: m for name, m, _ in all_of}
    return recommend(Judgement(measured, {name: row for name, _, row in all_of}), anywhere, Wish(**wish))


FIELD = [
    figures("none", 0.02, 100, kind="fp8"),
    figures("tensor", 0.008, 100, kind="fp8"),
    figures("attn_head", 0.00799, 100, kind="fp8", noise=NOISE.flip(0)),
    figures("int8", 0.001, 106),
    figures("int8, baked", 0.0005, 106, baked=True),
    figures("int4", 0.3, 56),
]


def test_the_cheapest_within_a_budget_of_kl():
    for budget, expected in {
        0.5: "int4",  # the cheapest
        0.03: "none",  # tensor is measurably better, and needs calibrated scales
        0.01: "tensor",
        0.005: "int8",  # as cheap, and needs no baked weights
        0.0007: "int8, baked",
        0.0004: REFERENCE,
    }.items():
        found = chosen(FIELD, kl=budget)
        assert found.chosen.cache == expected, budget
        assert found.chosen.kl.high <= budget
        others = {each.cache for each in found.alternatives}
        assert {expected, *others} == {REFERENCE, *(name for name, *_ in FIELD)}
    kl = FIELD[3][2].kl  # the upper end of the interval counts
    assert chosen([FIELD[3]], kl=(kl.value + kl.high) / 2).chosen.cache == REFERENCE
    assert chosen([FIELD[3]], kl=kl.high).chosen.cache == "int8"
    assert chosen(FIELD, kl=0.005, is_written=True).chosen.cache == "int8, baked"
    found = chosen(FIELD, kl=0.03)  # what is better and needs more is named
    why = {each.cache: each.why for each in found.alternatives}
    assert why["tensor"] == "measurably better, needs calibrated scales"
    assert why["int8"] == "more bytes"
    line = advised_cache(found)
    assert line.startswith("The cheapest within KL 0.03 is none, which needs nothing")
    assert "(attn_head, tensor: measurably better in as many bytes)" in line
    way = found.chosen.model_copy(update={"commands": ("make", "serve")})
    assert advised_cache(found.model_copy(update={"chosen": way})).endswith(": make && serve")


def test_tokens_that_fit_count_and_bytes_where_they_are_not_known():
    fits = {REFERENCE: 300_000, "int4": 300_000, "none": 125_000}  # a state's pages make INT4 no smaller
    found = chosen(FIELD, fits, kl=0.5, request_tokens=1000)
    assert (found.chosen.cache, found.request_tokens) == ("none", 1000)
    assert "8,000,000 tokens fit into a GB (10^9 bytes), 2.40 times" in answer_lines(found)[2]
    of = {each.cache: (each.tokens_per_gb, each.memory, each.why) for each in found.alternatives}
    assert of["int4"] == (3_333_333, 1.0, "fewer tokens fit")
    assert "int8" not in of  # its bytes say nothing of what fits
    assert "memory is not known" in found.not_served["int8"]
    assert "compared by bytes" in answer_lines(chosen(FIELD, kl=0.5))[2]
    found = chosen([FIELD[5]], fits, kl=0.5, request_tokens=1000)
    assert answer_lines(found)[0] == "16 bits: nothing else within KL 0.5 lets more tokens fit"
    even = {REFERENCE: 200_000, "none": 100_000}  # what is alike needs no rule
    found = chosen([FIELD[0], figures("int8", 0.02, 100)], even, kl=0.5, request_tokens=1000)
    assert {each.memory for each in found.alternatives} == {0.5, 1.0}
    sizes = {"h100": 50_000, "mi300x": 80_000}
    on_each = {(name, gpu): 2 * sizes[gpu] for name, gpu in product([REFERENCE], sizes)}
    on_each |= {("int4", gpu): size for gpu, size in sizes.items()}
    for gpus, tokens in (  # an H100 where it is served, else the first; 16 bits on the same
        (("mi300x", "b200"), 12_500_000),
        (("mi300x", "h100"), 20_000_000),
        ((), 20_000_000),
    ):
        best = chosen([FIELD[5]], on_each, gpus, kl=0.5, request_tokens=1000).chosen
        assert (best.memory, best.tokens_per_gb) == (0.5, tokens)


def test_the_best_within_a_budget_of_bytes_and_never_what_is_no_number():
    for share, expected in {0.3: "int4", 0.5: "tensor", 0.53: "int8, baked"}.items():
        assert chosen(FIELD, kl=None, share=share).chosen.cache == expected, share
    # 16 bits may be within the budget as well
    for share, words in ((1.0, "nothing that can be served has a lower KL"), (0.2, "nothing else")):
        found = chosen(FIELD, kl=None, share=share)
        assert found.chosen.cache == REFERENCE
        assert answer_lines(found)[0].startswith(f"16 bits: {words}")
    broken = figures("lmdeploy_int8", float("nan"), 50)
    assert chosen([broken], kl=1.0).chosen.cache == REFERENCE
    found = chosen([broken, FIELD[3]], kl=None, share=0.6)
    assert found.chosen.cache == "int8"
    assert found.alternatives[0].why == "its KL is not a finite number"
    assert "with a finite KL" in answer_lines(chosen([broken], kl=None, share=0.6))[0]


def test_what_does_not_differ_measurably_goes_to_the_simpler():
    same = [
        # documents in another order: which one is worse differs from one to the next
        figures("int8, baked", 1e-3, 106, baked=True, noise=NOISE.flip(0)),
        figures("attn_head", 1.0001e-3, 106, kind="fp8", noise=NOISE.roll(1, 0)),
        figures("tensor", 1.0002e-3, 106, kind="fp8", noise=NOISE.roll(2, 0)),
        figures("int8", 1.0003e-3, 106),
    ]
    for wish in ({"kl": 0.01}, {"kl": None, "share": 0.6}):
        for given in (same, same[::-1]):
            found = chosen(given, **wish)
            assert (found.chosen.cache, found.chosen.needs) == ("int8", "nothing")
            why = {each.cache: each.why for each in found.alternatives}
            assert why["int8, baked"] == "not measurably better, needs baked weights"
            assert why["tensor"] == "not measurably better, needs calibrated scales"
    assert chosen(same[:3], kl=0.01).chosen.cache == "tensor"
    assert chosen(same[:2], kl=0.01).chosen.cache == "attn_head"


def test_every_answer_can_be_served(caches_evaluation, caches_report, caches_directory):
    assert caches_report.recommended.chosen.cache in caches_report.advice[-1]
    assert caches_report.recommended.chosen.commands[-1] in caches_report.advice[-1]
    chart = charts(caches_report)["bytes"]
    assert ">tokens that fit, beside a 16-bit cache<" in chart.svg
    answer = caches_report.recommended
    known = {x.cache for x in (answer.chosen, *answer.alternatives) if x.tokens_per_gb}
    assert {point.name for point in chart.frontier} <= known
    assert {name for name in caches_report.variants if name.startswith("lmdeploy")} <= {*chart.omitted}
    judgement = Judgement(caches_evaluation.measured, caches_report.variants, caches_report.noise_floor)
    trusting = replace(caches_evaluation.offers, trust_remote_code=True)
    for place in product([None, "vllm", "sglang", "lmdeploy"], [None, "a100", "h100", "b200"]):
        engine, gpu = place
        found = recommend(judgement, caches_evaluation.offers, Wish(kl=1.0, engine=engine, gpu=gpu))
        served = [found.chosen.cache, *(each.cache for each in found.alternatives)]
        names = {name for name, row in caches_report.variants.items() if row.kind != "control"}
        assert set(served) | set(found.not_served) == names
        for name in served:
            variant = caches_evaluation.measured[name].variant
            offer = caches_evaluation.offers.find(variant, engine, gpu)
            trusted = trusting.find(variant, engine, gpu).commands
            assert trusted == tuple(f"{each} --trust-remote-code" for each in offer.commands)
            assert engine in (None, offer.engine), place
            assert gpu is None or name == REFERENCE or gpu in offer.gpus, place
            needs = [shlex.split(command)[:2] for command in offer.commands[:-1]]
            made = shlex.split(offer.commands[-2])[-1] if needs else str(caches_directory)
            assert made in shlex.split(offer.commands[-1]), (place, name)
            calibration = ["fp8kv-calibrate", str(caches_directory)]
            if name.endswith("baked"):
                assert needs == [calibration, ["fp8kv", "bake"]]
            elif name in ("tensor", "attn_head"):
                assert needs == [calibration]
            else:
                assert needs == []
        # on an A100 vLLM has FP8 for larger heads than these
        has_no_tensor = engine == "lmdeploy" or place == ("vllm", "a100")
        assert ("tensor" in served) != has_no_tensor, place


def test_fp8_that_ends_at_240(caches_evaluation):
    """It is given scales that the engine doubles there, and never 1.0, which clips."""
    offers, of = caches_evaluation.offers, {n: m.variant for n, m in caches_evaluation.measured.items()}
    for engine, name in (("vllm", "modelopt"), ("sglang", "sglang")):
        offer = offers.find(of["tensor"], engine, "mi300x")
        assert offer.gpus == ("mi300x",)
        assert f"--format {name} " in offer.commands[0]
        with pytest.raises(NotServed, match="ends at 240"):
            offers.find(of["fp8, baked"], engine, "mi300x")


@pytest.mark.parametrize("format_name", ["vllm", "vllm-nvfp4"])
def test_scales_in_the_checkpoint_are_not_1(format_name, caches_evaluation, caches_directory, tmp_path):
    succeeded(calibrate(caches_directory, "-o", tmp_path / "out", "--format", format_name))
    checkpoint = find_model(str(tmp_path / "out"))
    layers = Layers({0: Shape(2, 128, 128)}, 1)
    before = replace(caches_evaluation.offers, layers=layers)
    after = Offers("m", checkpoint, "", None, layers)
    for name in ("none", "fp8, baked", "nvfp4", "nvfp4_4over6"):
        variant = caches_evaluation.measured[name].variant
        before.find(variant, None, None)
        with pytest.raises(NotServed, match="has KV scales of its own, .* fp8kv strip"):
            after.find(variant, None, None)
    for name in (REFERENCE, "int8_per_token_head"):
        after.find(caches_evaluation.measured[name].variant, None, None)


def test_wishes_that_cannot_be_meant():
    for flags, problem in (
        (("0", None, None, None), "--budget-kl takes a number above 0 .*got '0'"),
        *(((text, None, None, None), f"got '{text}'") for text in ("nan", "much")),
        ((None, "-1", None, None), "--budget-bytes takes a number above 0"),
        ((None, "55", None, None), "--budget-bytes 55 is more than 1, .*; give 0.55 for"),
        (("1", "0.5", None, None), "give one of them"),
        ((None, None, "lmdeploy", "mi300x"), "lmdeploy on mi300x"),
    ):
        with pytest.raises(InputError, match=problem):
            make_wish(*flags)


def test_the_command_line_of_recommend(tmp_path, monkeypatch):
    one_line_error(fp8kv("recommend", "gone", "--budget-kl", "-1"), "--budget-kl takes a number above 0")
    one_line_error(
        fp8kv("recommend", "gone", "--set", "evaluation.kl_budget=0.1"),
        "--set evaluation.kl_budget would not be read here; set keys of `data`, or give a flag",
    )
    for pair in ("headroom=4", "data.samples=9"):
        one_line_error(fp8kv("eval", "gone", "--set", pair), "would not be read here; set keys of `data` and")
    one_line_error(fp8kv("recommend", "a\nb"), "has a control character, which no printed command can hold")
    # NVFP4 is not for heads of this size
    directory = save_model(tiny_model("llama", head_dim=40, num_hidden_layers=2), tmp_path / "40")
    flags = ("--budget-kl", "1", "--engine", "vllm", "--gpu", "h100", *FLAGS, "--write", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("calib.evaluate.run.load_model", lambda *_: pytest.fail("loaded"))
        one_line_error(fp8kv("recommend", directory, *flags, "--request-tokens", "999"), "999 is longer than")
        few = fp8kv("recommend", directory, *flags, "--samples", "7")
        one_line_error(few, "--samples 7: an interval over 7 samples tells little: measure 8 or more, as")
    done = ran("recommend", directory, *flags, "--request-tokens", "99", "-o", tmp_path / "page")
    assert any("nvfp4: head size 40" in each for each in done.stderr.splitlines())
    assert "in requests of 99, as vllm" in " ".join(done.stdout.split())
    assert {"tokens/GB", "speed was"} <= {*re.findall("tokens/GB|speed was", done.stdout)}
    for name in ("int4_per_token_head", "int8_per_token_head", "tensor"):
        assert f" {name} │" in done.stdout
    serve, report = done.stdout.splitlines()[-2:]
    assert serve.startswith(f"  vllm serve {tmp_path / 'out'} --kv-cache-dtype int4")
    assert report == f"report written to {tmp_path / 'page' / 'report.html'}"
    one_line_error(fp8kv("recommend", directory, *flags), "add --overwrite")
    first, *further = [line for line in done.stdout.splitlines() if " not offered (" in line]
    types = [f"lmdeploy_{bits}{baked}" for bits in ("int8", "int4") for baked in ("", ", baked")]
    assert first.startswith("; ".join(types))
    assert first.endswith(" are not offered (in lmdeploy, not in vllm)")
    assert all("octave_k3v" in line for line in further)


@pytest.mark.parametrize(
    ("wish", "prepared"),
    [
        (("--budget-kl", "1e-9"), "reference"),
        (("--budget-bytes", "0.55"), "baked"),
        (("--budget-kl", "0.004", "--engine", "sglang"), "tensor"),
        (("--budget-kl", "0.01", "--engine", "sglang"), "none"),
    ],
)
def test_what_is_recommended_is_written_and_measured_again(wish, prepared, tmp_path, monkeypatch):
    model = tiny_model("llama", head_dim=64, num_hidden_layers=2)
    for layer in model.model.layers if prepared == "tensor" else ():  # V beyond FP8 at scale 1.0
        layer.self_attn.v_proj.weight.data *= 2.0**12
        layer.self_attn.o_proj.weight.data *= 2.0**-12
    if prepared == "none":  # as it is, by chance, with a real model
        monkeypatch.setattr(Judgement, "simplest", lambda *_: "none")
    directory, out, page = save_model(model, tmp_path / "model"), tmp_path / "out", tmp_path / "report"
    flags = (*wish, *FLAGS, "--write", out, "--json")
    answer = json.loads(ran("recommend", directory, *flags, "-o", page).stdout)
    assert (prepared in answer["chosen"]["cache"], f" {out}" in answer["written"]["serve"]) == (True, True)
    report = json.loads((page / "report.json").read_text())
    chosen = answer["chosen"]["cache"].replace("reference", "16 bits")
    first, second = report["advice"]
    assert re.match(rf"(The (best|cheapest) within .* is|Serve) {chosen}[,:]", first)
    kl = answer["written"]["kl"]
    assert f"was written to {out}: KL {kl['value']:.2g} nats [{kl['low']:.2g}, {kl['high']:.2g}]" in second
    assert report["recommended"]["chosen"]["commands"] == [answer["written"]["serve"]]
    assert report["verdict"].startswith(f"{chosen}: ")
    assert report["subject"] == answer["chosen"]["cache"]
    recommended, kl = answer["chosen"]["kl"]["value"], answer["written"]["kl"]["value"]
    mixed = fp8kv("recommend", directory, *flags[:-2], tmp_path / "mixed" / "a", "-o", tmp_path / "mixed")
    one_line_error(mixed, "would mix with the report in", "choose another --write")
    assert recommended / 10 <= kl <= 10 * recommended  # of other text and another calibration
    if prepared == "none":
        card = (out / "README.md").read_text()
        assert card.startswith(f"# {directory}, for a KV cache of type fp8\n")
        assert answer["written"]["serve"] in card
        return
    if prepared == "reference":  # needs nothing
        serve = f"its cache, 16 bits, needs none; serve it with {answer['written']['serve']}"
        one_line_error(fp8kv("verify", out), serve)
        weights = [load_file(next(path.glob("*.safetensors"))) for path in (directory, out)]
        torch.testing.assert_close(*weights, rtol=0, atol=0)
        return
    if prepared == "baked":
        assert json.loads((out / "fp8kv_bake.json").read_text())["for"] == "int8"
        return
    succeeded(fp8kv("verify", out, "--engine", "sglang"))

    save, saved, resumed = SavedProgress.save_sometimes, progress_file(out, 0), []
    flags = (*flags, "--overwrite", "--set", "save_minutes=0")
    with monkeypatch.context() as patch:

        def save_and_stop(*arguments):
            save(*arguments)
            os.kill(os.getpid(), signal.SIGTERM)

        patch.setattr(SavedProgress, "save_sometimes", save_and_stop)
        goes_on = "terminated; progress is saved: the same command with --resume goes on"
        one_line_error(fp8kv("recommend", directory, *flags), goes_on)
        patch.setattr("calib.evaluate.run._calibrate", lambda *_: pytest.fail("measured"))
        for other in (("--seed", 7), ("--suite", "full")):
            one_line_error(
                fp8kv("recommend", directory, *flags, *other), "is of a run with another recipe, so"
            )

    def spoil(model, recipe, output, *, resume, **flags):
        resumed.append(resume)
        saved.unlink()
        return calibrate_model(model, recipe.model_copy(update={"headroom": 1 / 16}), output, **flags)

    monkeypatch.setattr("calib.recommendation.calibrate", spoil)
    again = fp8kv("recommend", directory, *wish, *FLAGS, "--write", out / "a", "-o", page)
    one_line_error(again, "report' is finished; add -")
    (page / ".report.md").mkdir()  # in the way of the report, and the answer is not lost
    content = saved.read_bytes()
    fp8kv("recommend", directory, *flags, "--resume")
    saved.write_bytes(content)
    done = fp8kv("recommend", directory, *flags, "-o", page)
    assert resumed == [True, True]
    assert (done.exit_code, json.loads(done.stdout)["written"]["output"]) == (1, str(out))
    assert all(words in done.stderr for words in ("its KL is above", "no file of a report was replaced"))
