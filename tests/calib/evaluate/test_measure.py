"""Divergence and its intervals, layers to skip, long documents; scales, errors, clipped tokens of layers."""

import re
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from command_line import fp8kv, one_line_error
from evaluations import variants_of
from fake_quant import fake_quantized
from families import FAMILIES, save_model, tiny_model, tiny_vision_language_model
from transformers import AutoModelForCausalLM

from calib.capture.attention import observe_qkv
from calib.capture.capabilities import check_fp8_cache
from calib.capture.loop import calibrate
from calib.data import MediaSample, make_batches
from calib.errors import InputError
from calib.evaluate import layer_errors, measure
from calib.evaluate.measure import _only, compare_variants, search_layers
from calib.evaluate.page.page import render_html, render_markdown
from calib.evaluate.page.tables import printed_tables
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.statistics import Divergence, bin_positions, difference, estimate, quantile, ratio
from calib.evaluate.summarize import summarize
from calib.evaluate.variants import BUILT_IN, REFERENCE, Setup, Variant, build_variants, drop_first_tokens
from calib.evaluate.verdict import _search_line
from calib.recipe import load_recipe
from calib.scales.observers import AbsMax
from calib.scales.scales import KVScales, LayerScales
from calib.scales.stats import KVStats, TensorStats

pytestmark = pytest.mark.xdist_group("evaluate")


def document(seed, length):
    return torch.randint(1, 90, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_chunks_give_what_one_pass_gives(monkeypatch):
    # float64, where chunks differ by what attention does in float32 alone; a document of which no K or V lies
    # so near the middle of two codes that this decides
    model, tokens = tiny_model("gemma3_text", **FAMILIES["gemma3_text"]).double(), document(1, 37)
    variants, setup = [*variants_of(model, tokens).values()], Setup(model, None, "torch")
    whole = compare_variants(setup, tokens, variants)
    monkeypatch.setattr(measure, "_TOKENS", 10)
    chunked = compare_variants(setup, tokens, variants)
    assert list(whole) == [REFERENCE, *(variant.name for variant in variants)]
    for name, divergence in whole.items():
        assert (divergence.kl.shape, divergence.nll.shape) == ((37,), (36,))
        torch.testing.assert_close(chunked[name].kl, divergence.kl, rtol=1e-3, atol=1e-8)
        torch.testing.assert_close(chunked[name].nll, divergence.nll, rtol=1e-4, atol=1e-5)
        assert torch.equal(chunked[name].agrees, divergence.agrees)
    assert whole["e5m2"].kl.mean() > 1.5 * whole["tensor"].kl.mean() > 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v"])
@torch.inference_mode()
def test_pictures_and_generated_rows_move_no_text_that_is_read_later(family, monkeypatch):
    model, text = tiny_vision_language_model(family, max_position_embeddings=512), document(1, 40)
    model.config.image_token_id, kinds = 100, torch.tensor([0, 0, *[1] * 16, 0, 0])
    pictures = {"pixel_values": torch.randn(64, 1176), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    sample = MediaSample((1, 0), kinds, b"", lambda: pictures | {"mm_token_type_ids": kinds[None]})
    setup, expected = Setup(model, None, "torch"), model(text[None], labels=text[None]).loss.item()
    monkeypatch.setattr(measure, "_TOKENS", 10)
    for read_before in (
        lambda: compare_variants(setup, torch.where(kinds == 1, 100, 5), [], sample),
        lambda: model.generate(text.view(2, 20), max_new_tokens=3),
    ):
        read_before()
        nll = compare_variants(setup, text, [])[REFERENCE].nll
        assert nll.mean().item() == pytest.approx(expected, rel=1e-5)
        read_before()
        check_fp8_cache(model)


@torch.inference_mode()
def test_the_kernels_give_the_same_figures():
    model, tokens = tiny_model("llama", num_hidden_layers=1), document(1, 8)
    tensor = [variants_of(model, tokens)["tensor"]]
    setups = (Setup(model, None, backend) for backend in ("torch", "triton"))
    plain, kernels = (compare_variants(setup, tokens, tensor)["tensor"] for setup in setups)
    assert not torch.equal(kernels.kl, plain.kl)  # they add in another order
    torch.testing.assert_close(kernels.kl, plain.kl, rtol=1e-3, atol=1e-8)


@torch.inference_mode()
def test_no_other_choice_of_layers_is_smaller():
    documents, model = [document(30, 30), document(20, 20)], tiny_model("llama", num_hidden_layers=4).eval()
    setup, variant = Setup(model, None, "torch"), variants_of(model, *documents)["tensor"]

    def mean_kl(skipped):
        only = _only(variant, set(range(4)) - set(skipped))
        kl = [compare_variants(setup, each, [only])[only.name].kl for each in documents]
        return torch.cat(kl).double().mean().item()

    kl_of = {skipped: mean_kl(skipped) for n in range(4) for skipped in combinations(range(4), n)}
    kl_of[0, 1, 2, 3] = 0.0
    for share in (0.0, 0.1, 0.3, 0.6, 1.5):
        budget = share * kl_of[()]
        found = search_layers(setup, [variant], documents, budget)
        assert len(found.skipped) == min(len(skipped) for skipped, kl in kl_of.items() if kl <= budget)
        assert found.kl == pytest.approx(kl_of[found.skipped], rel=1e-6)
        assert found.kl <= budget
        assert found.kl_of_all == pytest.approx(kl_of[()], rel=1e-6)
        for layer, kl in found.kl_alone.items():
            assert kl == pytest.approx(kl_of[tuple(i for i in range(4) if i != layer)], rel=1e-6)
        if found.skipped:  # in vLLM's words, at the end of its line so that it can be copied
            argument = " ".join(["--kv-cache-dtype-skip-layers", *map(str, found.skipped)])
            assert _search_line(found).endswith(f" {argument}")


@pytest.mark.parametrize("family", ["gpt_oss", "paligemma"])
def test_a_model_with_one_attention_implementation_has_one_control(family, tmp_path):
    options = FAMILIES.get(family)
    model = tiny_model(family, **options) if options else tiny_vision_language_model(family)
    choices = {"data.dataset": "random", "dtype": "float32", "evaluation.variants": ("tensor",)}
    recipe, path = load_recipe(None, choices), save_model(model, tmp_path / "model")
    found = evaluate(str(path), recipe, suite=Suite(3, 2, 24, 0, 5, (), (), 1))
    assert [name for name, m in found.measured.items() if m.variant.kind == "control"] == ["bf16"]
    assert any("one attention implementation" in line for line in found.warnings)


def test_the_interval_covers_the_mean_19_times_in_20_and_quantiles_are_of_all_tokens():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):
        # 40 documents that differ in level: tokens of one are alike
        found = estimate([rng.normal(rng.normal(3.0, 1.0), 0.1, size=30) for _ in range(40)])
        covered += found.low <= 3.0 <= found.high
    # binomial: 190 expected, standard deviation 3; a bootstrap of 40 is a little narrow
    assert 178 <= covered <= 199
    assert estimate([np.arange(50.0), np.arange(50.0, 101.0)], quantile(0.99)).value == 99.0


def test_a_ratio_and_a_difference_of_means_are_resampled_by_document():
    rng = np.random.default_rng(0)
    weights = rng.uniform(1.0, 5.0, 50)
    found = ratio(3.0 * weights, weights)
    assert found.low == pytest.approx(found.value) == pytest.approx(found.high) == pytest.approx(3)
    spread = ratio(rng.normal(3.0, 1.0, 50) * weights, weights)
    assert 0.3 < spread.high - spread.low < 1.0  # a mean of 50 documents is off by about 1 / sqrt(50)
    rng = np.random.default_rng(1)
    here, there = [rng.normal(2.0, 1.0, 50) for _ in range(40)], [rng.normal(1.0, 1.0, 30) for _ in range(30)]
    found = difference(here, there)
    assert found.value == pytest.approx(np.concatenate(here).mean() - np.concatenate(there).mean())
    assert found.low < found.value < found.high
    # variances of two means of 2,000 and 900 values add up; 1,000 resamples are within 10 %
    assert found.high - found.low == pytest.approx(2 * 1.96 * (1 / 2000 + 1 / 900) ** 0.5, rel=0.35)
    assert difference(there, here).value == -found.value


def test_positions_of_documents_of_different_lengths():
    values = (torch.arange(20.0), torch.full((5,), 7.0), torch.ones(40))
    first, second, third = bin_positions([Divergence(kl.double(), kl > 1, kl) for kl in values])
    assert (first.tokens, second.tokens, third.tokens) == (37, 20, 8)
    assert second.value == pytest.approx((16 + 17 + 18 + 19 + 16) / 20)
    assert (first.top1.value, second.top1.value) == (pytest.approx((14 + 5) / 37), pytest.approx(4 / 20))
    assert (third.low, third.high) == (1.0, 1.0)  # one document alone


def test_poisson_intervals_are_the_tabulated_ones():
    # half the quantiles 0.025 of chi-square with 2 n degrees of freedom, and 0.975 with 2 n + 2, as
    # tables of the exact Poisson interval print them
    table = {0: (0.0, 3.6889), 1: (0.0253, 5.5716), 100: (81.3640, 121.6268)}
    for events, ends in (table | {10**6: (998040.9833, 1001961.9119)}).items():
        assert layer_errors.poisson_interval(events) == pytest.approx(ends, abs=5e-5), events


def seen_by(model, documents):
    """K and V [K, tokens of all documents, D] by layer, from plain transformers' own forward."""
    seen = {}

    def keep(name, query, *pair):
        layer = seen.setdefault(model.get_submodule(name).layer_idx, ([], []))
        for kept, x in zip(layer, pair, strict=True):
            kept.append(x[0])

    with torch.inference_mode(), observe_qkv(model, keep):
        for document in documents:
            model(document.view(1, -1), use_cache=False)
    return {idx: [torch.cat(parts, 1) for parts in pair] for idx, pair in seen.items()}


def test_variants_have_scales_of_what_they_round():
    # a model to which only a sample's first token is a 1: no key is larger than its
    model, samples = tiny_model("llama"), [list(range(1 + i, 40 + i)) for i in range(3)]
    first = model.model.layers[0].self_attn.k_proj.weight
    with torch.no_grad():
        model.model.embed_tokens.weight[1] = first[first.norm(dim=1).argmax()]
    recipe = load_recipe(None, {"means": True, "targets": "qkv", "observer.name": "mse"})
    stats, skipping = (calibrate(model, make_batches(samples, 1, 0, skip_first=n), recipe) for n in (0, 1))
    scales = {variant.name: variant.scales for variant in build_variants(stats, stats)}
    assert {REFERENCE, *scales} == set(BUILT_IN)
    keys = {idx: k for idx, (k, _) in seen_by(model, map(torch.tensor, samples)).items()}
    for layer in scales["channel+k_center"].layers.values():
        mean = keys[layer.layer_idx].double().mean(1).float()
        left = (keys[layer.layer_idx] - mean[:, None]).abs().amax(1)
        torch.testing.assert_close(layer.k_center, mean)
        torch.testing.assert_close(layer.k * 448, left)
    # `rest` has the scales of a calibration that skips first tokens
    expected = skipping.scales(strategy="tensor", observer=AbsMax())
    for name, layer in scales["rest"].layers.items():
        rest = keys[layer.layer_idx].unflatten(1, (3, 39))[:, :, 1:]
        assert torch.equal(layer.k, rest.abs().amax().view(1) / 448)
        assert torch.equal(layer.v, expected.layers[name].v)
    pairs = zip(scales["rest"].layers.values(), scales["tensor"].layers.values(), strict=True)
    assert any(rest.k < tensor.k for rest, tensor in pairs)  # here the first token matters
    name, layer = next(iter(stats.layers.items()))  # a head that only the first token sees keeps its amax
    positions = layer.k.positions.clone()
    positions[1, 1:] = 0
    layer = replace(layer, k=replace(layer.k, positions=positions))
    rest = drop_first_tokens(KVStats({name: layer})).layers[name]
    assert rest.k.amax[1].item() == layer.k.amax[1].max()
    assert rest.k.amax[0].item() == layer.k.positions[0, 1:].max()
    with pytest.raises(InputError, match="calibrate again"):
        drop_first_tokens(KVStats({name: replace(layer, k=TensorStats(layer.k.amax))}))


def test_amax_and_histogram_are_those_of_the_reference(plain, small_report):
    model, documents = plain
    expected = seen_by(model, documents[:2])
    assert [layer["layer_idx"] for layer in small_report["layers"]] == sorted(expected) == [0, 1, 2]
    vanished = 0
    for layer in small_report["layers"]:
        none = small_report["variants"]["none"]["layers"][layer["layer_idx"]]
        for letter, x in zip("kv", expected[layer["layer_idx"]], strict=True):
            found, amax = layer[letter], x.abs().amax((1, 2))
            torch.testing.assert_close(torch.tensor(found["amax"]), amax, rtol=1e-6, atol=0)
            np.testing.assert_allclose(none["range_used"][letter], amax / 448, rtol=1e-6)
            lost = (x.to(torch.float8_e4m3fn).float() == 0) & (x != 0)
            np.testing.assert_allclose(none["underflowed"][letter], lost.double().mean((1, 2)), rtol=1e-6)
            vanished += int(lost.sum())
            counts = found["counts"]
            assert sum(counts) + found["zeros"] == x.numel()
            edges = 2.0 ** (found["log2_first"] + np.arange(len(counts) + 1) / 2)
            np.testing.assert_array_equal(np.histogram(x.abs().double().flatten(), edges)[0], counts)
    assert vanished


def test_histogram_bins_are_exact_where_logarithms_round():
    assert 1.4142 < 2.0**0.5 < 1.4143
    x = torch.tensor([1.0, -1.4142, 1.4143, 2.0, 0.0, 2.0**-149, 2.0**127])
    found = layer_errors.layer_values(x[None, None, None], torch.zeros(1, 1, 3, 4))
    bins = dict(enumerate(found.histogram[0, 0].tolist(), start=layer_errors.FIRST_BIN))
    assert {i: n for i, n in bins.items() if n} == {0: 2, 1: 1, 2: 1, -298: 1, 254: 1}
    assert found.zeros.tolist() == [[1, 12]]
    assert found.histogram[0, 1].sum() == 0


def test_heads_that_transformers_repeats_are_counted_once():
    model, one = tiny_model("falcon", **FAMILIES["falcon"]), torch.ones(1)
    layers = {f"layers.{idx}": LayerScales(idx, one, one) for idx in range(3)}
    variant = Variant("one", "one", "fp8", KVScales("tensor", "e4m3fn", layers, {}))
    errors, values = layer_errors.read_layers(Setup(model, None), [(torch.arange(9), None)], [variant])
    counted = [(layer.amax.shape, int(layer.histogram[0, 0].sum())) for layer in values.values()]
    assert counted == [((1, 2, 2), 2 * 9 * 16)] * 3
    # of its own attention, which hands out [B, H, T, D]
    assert [layer.error.shape for layer in errors["one"].values()] == [(1, 4)] * 3


def test_an_error_is_over_all_heads_and_scales_are_those_of_the_variant(small_evaluation, small_report):
    rows = {name: row.get("layers") for name, row in small_report["variants"].items()}
    for row in rows["tensor"]:
        layer = small_evaluation.measured["tensor"].layers[row["layer_idx"]]
        assert layer.error.shape == (2, 4)
        found = row["rel_rms_layer"]
        assert found["value"] == pytest.approx((layer.error.sum() / layer.power.sum()).sqrt().item())
        by_document = (layer.error.sum(1) / layer.power.sum(1)).sqrt()
        assert by_document.min() * 0.999 <= found["low"] <= found["value"]
        assert found["value"] <= found["high"] <= by_document.max() * 1.001
        assert [0 < error < 0.2 for error in row["rel_rms"]] == [True] * 4
    assert max(max(row["range_used"]["k"]) for row in rows["tensor"]) > 0.5
    assert all(share == 0 for row in rows["none"] for share in row["saturated"]["k"])
    for name in ("tensor", "attn_head", "channel"):
        scales = small_evaluation.measured[name].variant.scales.layers.values()
        for row, layer in zip(rows[name], scales, strict=True):
            for letter, x in (("k", layer.k), ("v", layer.v)):
                extremes = {"min": x.min().item(), "max": x.max().item()}
                assert row["scale"][letter] == (extremes if name == "channel" else x.squeeze().tolist())


@pytest.mark.parametrize("tensors", ["kv", "k"])
def test_clipped_tokens_are_counted_one_by_one(tensors):
    documents = [torch.randint(1, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 9)]
    model, texts = tiny_model("mistral", **FAMILIES["mistral"]).eval(), [(x, None) for x in documents]
    seen = seen_by(model, documents)
    # scales per head with 0.8 of what would hold every value
    amax = {idx: [x.abs().amax((1, 2)) for x in pair] for idx, pair in seen.items()}
    tight = {f"layers.{idx}": LayerScales(idx, *(0.8 * x / 448 for x in pair)) for idx, pair in amax.items()}
    variant = Variant("tight", "", "fp8", KVScales("attn_head", "e4m3fn", tight, {}), tensors)
    read = partial(layer_errors.read_layers, Setup(model, None, "torch"), texts, [variant])
    counted, errors = (read(with_errors=each)[0]["tight"] for each in (False, True))
    everywhere = set()
    for idx, pair in seen.items():
        layer = variant.layers[idx]
        hit, by_head, shares = set(), {}, {}
        for letter, x, scale in zip("kv", pair, (layer.k, layer.v), strict=True):
            is_beyond = (x / scale[:, None, None]).abs() > 448
            shares[letter] = is_beyond.double().mean((1, 2)).tolist()
            if letter in tensors:
                by_head[letter] = [int(head.any(-1).sum()) for head in is_beyond]
                hit |= {t for t in range(30) if is_beyond[:, t].any()}
        everywhere |= hit
        clipped = layer_errors.clipped_layer(idx, counted[idx], tensors)
        for row in (clipped, layer_errors.layer_row(idx, errors[idx], layer, tensors)):
            found = row.exceedance
            assert (found.tokens, found.events, found.by_head) == (30, len(hit), by_head)
            for letter in "kv":
                assert row.saturated[letter] == pytest.approx(shares[letter])
            low, high = (x / 30 for x in layer_errors.poisson_interval(len(hit)))
            assert (found.low, found.high) == (low, min(high, 1.0))  # a share
        assert 0 < len(hit) < 30
        assert torch.equal(counted[idx].saturated, errors[idx].saturated)
        assert torch.equal(counted[idx].values, errors[idx].values)
    assert layer_errors.count_events(counted.values(), tensors).events == len(everywhere)


@pytest.fixture(scope="module")
def directory(tmp_path_factory, byte_tokenizer):
    model = tiny_model("llama", vocab_size=262, max_position_embeddings=1024)
    path = save_model(model, tmp_path_factory.mktemp("model") / "bytes")
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def evaluation(directory):
    choices = {"data.dataset": "random", "dtype": "float32", "evaluation.caches": ["int8_per_token_head"]}
    recipe = load_recipe(None, choices | {"evaluation.variants": ["none", "tensor", "k only"]})
    return evaluate(str(directory), recipe, suite=Suite(3, 2, 64, 0, 0, (), (), 1, 700, 3))


def test_every_pair_is_spread_over_the_text_and_asked_for_once_at_its_end(evaluation):
    decode = evaluation.setup.tokenizer.decode
    for document in evaluation.text.long_documents:
        ids, text = document.token_ids, decode(document.token_ids)
        found = [*re.finditer(r"\n(\w+): (\w+)\n", text)]
        pairs = [each.groups() for each in found]
        assert sorted(pairs[:16]) == sorted({*pairs}) == sorted(pairs[16:])
        gaps = [b.start() - a.start() for a, b in pairwise(found[:17])]
        assert max(gaps) < 2 * min(gaps)
        assert (len(ids), found[-1].end()) == (700, len(text))
        assert torch.equal(ids[document.questions + 1], document.answers[:, 0])
        assert [decode(row[0]) for row in document.answers] == [word[0] for _, word in pairs[16:]]
        assert all(len({*row.tolist()}) == 16 for row in document.answers)


@torch.inference_mode()
def test_figures_are_those_of_plain_transformers_and_shown_everywhere(evaluation, directory):
    model, report = AutoModelForCausalLM.from_pretrained(directory).float().eval(), summarize(evaluation)
    scales, margins, last = evaluation.measured["tensor"].variant.scales, [], []
    for document in evaluation.text.long_documents:
        own = model(document.token_ids[None]).logits[0].log_softmax(-1)
        with fake_quantized(model, scales):
            rounded = model(document.token_ids[None]).logits[0].log_softmax(-1)
        words = [x[document.questions].gather(1, document.answers) for x in (own, rounded)]
        margins.append(torch.stack([each[:, 0] - each[:, 1:].max(1).values for each in words]))
        kl = (own.exp() * (own - rounded)).sum(-1)
        last.append(torch.stack([kl, own.argmax(-1) == rounded.argmax(-1)])[:, 512:])
    (own, rounded), (kl, top1) = torch.cat(margins, 1), torch.cat(last, 1)
    long = report.variants["tensor"].long
    for found, want in (
        (long.margin, rounded),
        (long.margin_change, rounded - own),
        (long.margin_moved, (rounded - own).abs()),
        (long.retrieved, (rounded > 0).float()),
        (long.kl_by_position[-1], kl),
        (long.kl_by_position[-1].top1, top1),
    ):
        assert found.value == pytest.approx(want.mean().item(), rel=0.02, abs=1e-6)
    assert [each.to for each in long.kl_by_position][-3:] == [256, 512, 700]
    assert 0 < report.variants["int8_per_token_head"].long.margin_moved.value < long.margin_moved.value
    assert {name for name, row in report.variants.items() if row.long is None} == {"bf16", "eager", "k only"}
    report = report.model_copy(update={"subject": "tensor"})
    printed = "\n".join(" ".join(line) for table in printed_tables(report) for line in table.lines)
    for text in (printed, render_markdown(report), render_html(report)):
        assert f"{long.margin_moved.value:.3f}" in text
        assert f"{long.kl_by_position[-1].top1.value:.1%}" in text
    assert "2,100 tokens in 3 long documents" in text


def test_what_cannot_be_asked_is_refused(directory, tmp_path):
    words = save_model(tiny_model("llama", max_position_embeddings=1024), tmp_path / "words")
    for model, tokens, said in (
        (directory, "1025", "--long 1025 is longer than the model's 1024"),
        (directory, "300", "--long 300: no room for 16 pairs and questions; give 4"),
        (words, "900", "--long 900: this tokenizer does not tell the words apart"),
    ):
        small = ("--dataset", "random", "--samples", "2", "--seq-len", "32", "--variants", "none")
        one_line_error(fp8kv("eval", model, *small, "--long", tokens), said)
    recipe = load_recipe(None, {"data.dataset": "random", "evaluation.variants": ["none"]})  # a suite's own
    found = evaluate(str(words), recipe, suite=Suite(3, 2, 32, 0, 0, (), (), 0, 900, 2))
    said = "long documents of 900 tokens are left out: this tokenizer does not tell"
    assert any(line.startswith(said) for line in found.warnings)
    # scale 1.0 needs no text, and what nothing was measured of has no column
    report = summarize(found)
    for text in (render_markdown(report), render_html(report)):
        assert re.findall("too few to tell|[Ss]cales from|passkeys</a></th>|passkeys [|]", text) == []
