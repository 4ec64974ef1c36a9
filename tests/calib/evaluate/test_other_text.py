"""`--also`: the same scales on other text, what the report says of it, and what is refused."""

import json
import random

import numpy as np
import pytest
import torch
from command_line import fp8kv, one_line_error
from families import FAMILIES, save_model, tiny_model

from calib.capture.attention import observe_qkv
from calib.data import load_data
from calib.errors import InputError
from calib.evaluate.layer_errors import poisson_interval
from calib.evaluate.measure import compare_variants
from calib.evaluate.other_text import is_clipped, judge_difference
from calib.evaluate.page.page import render_html, render_markdown
from calib.evaluate.page.tables import other_text_tables
from calib.evaluate.report import Events, Figure, Report, Suite
from calib.evaluate.run import check_evaluation, evaluate
from calib.evaluate.statistics import difference
from calib.evaluate.summarize import summarize
from calib.evaluate.variants import Setup
from calib.models.config import load_config
from calib.models.load import load_model, load_tokenizer
from calib.models.sources import find_model
from calib.recipe import DataRecipe, load_recipe

SUITE = Suite(4, 4, 24, 0, 0, (), (), 2)
VARIANTS = ["none", "tensor", "attn_head", "channel"]
CHOICES = {"device": "cpu", "dtype": "float32", "evaluation.variants": VARIANTS}


def write_words(path, words, rows=24, length=40):
    """A dataset of `rows` documents of `length` of `words`."""
    rng = random.Random(0)
    lines = (" ".join(rng.choices(words, k=length)) for _ in range(rows))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two texts that share no word."""
    directory = tmp_path_factory.mktemp("texts")
    own = write_words(directory / "own.jsonl", [f"w{i}" for i in range(3, 30)])
    other = write_words(directory / "other.jsonl", [f"w{i}" for i in range(60, 120)])
    return own, other


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    model = tiny_model("mistral", **FAMILIES["mistral"])
    return save_model(model, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def recipe(texts):
    own, other = texts
    return load_recipe(None, CHOICES | {"data.dataset": own, "evaluation.also": [other, "all"]})


@pytest.fixture(scope="module")
def evaluation(directory, recipe):
    return evaluate(str(directory), recipe, suite=SUITE)


@pytest.fixture(scope="module")
def report(evaluation):
    return summarize(evaluation)


@pytest.fixture(scope="module")
def setup(directory, recipe):
    checkpoint = find_model(str(directory))
    config = load_config(checkpoint)
    model = load_model(checkpoint, config, recipe.dtype, recipe.device)
    return Setup(model, load_tokenizer(checkpoint), "torch")


def test_every_built_in_text_is_read_beside_the_named(report, texts):
    found = {each.dataset: each.documents for each in report.other_texts}
    half_as_many = {"builtin:long": 2}
    shorts = (texts[1], "builtin:python-docs", "builtin:code", "builtin:script", "random")
    assert found == dict.fromkeys(shorts, 4) | half_as_many
    tokens = {each.dataset: each.tokens for each in report.other_texts}
    assert tokens[texts[1]] == tokens["random"] == 4 * 24
    assert tokens["builtin:long"] == 2 * 4 * 24
    (left_out,) = (line for line in report.warnings if line.startswith("--also"))
    assert left_out.startswith("--also all: 'builtin:chat' is left out: row ")
    assert "holds chats but the tokenizer has no chat template" in left_out
    # scales that engines load; `channel` they do not
    assert all([*each.variants] == ["none", "tensor", "attn_head"] for each in report.other_texts)


def test_kl_is_that_of_the_documents(evaluation, report, setup, texts):
    data = DataRecipe(dataset=texts[1], samples=4, seq_len=24)
    samples = load_data(data, setup.tokenizer, None).samples
    kept = [evaluation.measured[name].variant for name in ("tensor", "none")]
    with torch.inference_mode():
        kl = [compare_variants(setup, torch.tensor(ids), kept) for ids in samples]
    for variant in kept:
        row = report.other_texts[0].variants[variant.name]
        mean = torch.cat([each[variant.name].kl for each in kl]).mean().item()
        assert row.kl.value == pytest.approx(mean, rel=1e-6)
        own = report.variants[variant.name].kl.value
        assert row.difference.value == pytest.approx(mean - own, rel=1e-5, abs=1e-12)
        assert row.kl.low <= row.kl.value <= row.kl.high
    nll = torch.cat([each["reference"].nll for each in kl]).double().mean()
    assert report.other_texts[0].ppl == pytest.approx(nll.exp().item(), rel=1e-6)


def test_clipped_tokens_are_recounted_from_k_and_v(evaluation, report, setup, texts):
    data = DataRecipe(dataset=texts[1], samples=4, seq_len=24)
    samples = load_data(data, setup.tokenizer, None).samples
    seen = {}
    with observe_qkv(setup.model, lambda name, q, k, v: seen.setdefault(name, []).append((k, v))):
        for ids in samples:
            with torch.inference_mode():
                setup.model(torch.tensor([ids]), use_cache=False)
    row = report.other_texts[0].variants["attn_head"]
    scales = evaluation.measured["attn_head"].variant.scales
    anywhere = torch.zeros(4 * 24, dtype=torch.bool)
    for layer, (name, pairs) in zip(row.layers, seen.items(), strict=True):
        held = scales.layers[name]
        whole = torch.zeros_like(anywhere)
        for i, (letter, scale) in enumerate((("k", held.k), ("v", held.v))):
            for head in range(len(scale)):
                x = torch.cat([pair[i][0, head] for pair in pairs])  # [T, D]
                beyond = x.abs() > 448 * scale[head]
                assert layer.saturated[letter][head] == pytest.approx(beyond.double().mean().item())
                tokens = beyond.any(1)
                assert layer.exceedance.by_head[letter][head] == int(tokens.sum())
                whole |= tokens
        assert (layer.exceedance.events, layer.exceedance.tokens) == (int(whole.sum()), 96)
        anywhere |= whole
    # words that the scales have never seen
    assert row.clipped.events == int(anywhere.sum()) > 10
    assert row.clipped.high == min(1.0, poisson_interval(row.clipped.events)[1] / 96)


def test_scales_with_a_quarter_of_the_room_clip_and_are_named(directory, texts, tmp_path):
    own, other = texts
    out = tmp_path / "tight"
    small = ("--samples", 4, "--seq-len", 24, "--device", "cpu", "--quiet")
    made = fp8kv(
        "calibrate",
        directory,
        "-o",
        out,
        "--dataset",
        own,
        *small,
        "--set",
        "headroom=0.25",
        "--allow-few-tokens",
    )
    assert made.exit_code == 0, made.stderr
    wanted = ("--scales", out, "--dataset", own, "--variants", "tensor", "--also", other)
    size = ("--samples", 4, "--seq-len", 24, "--device", "cpu")
    done = fp8kv("eval", directory, *wanted, *size, "-o", tmp_path / "report")
    assert done.exit_code == 0, done.stderr
    report = Report.model_validate_json((tmp_path / "report/report.json").read_text())
    clipped = report.other_texts[0].variants["tight"].clipped
    assert clipped.share > 0.9
    said = f"With scales of 'tight', K or V are clipped on {other} ({clipped.share:.1%} of tokens)"
    assert f". {said}; here" in report.verdict
    assert report.verdict.endswith(".")
    assert "Other text, 'tight'" in done.stdout
    assert f"{clipped.share:.2%} [{clipped.low:.2%}, {clipped.high:.2%}]" in done.stdout
    # the scales that hold all of their own text are in the report alone
    assert "Other text, 'tensor'" not in done.stdout
    assert report.other_texts[0].variants["tensor"].clipped.events < clipped.events


def test_the_tables_have_the_figures(report):
    tables = other_text_tables(report)
    assert tables[0].title == report.subject
    page, text = render_html(report), render_markdown(report)
    assert '<a href="#other">' in page
    assert "## Other text" in text
    for table in tables:
        assert table.lines[0][0].endswith("own.jsonl (its own)")
        assert [row[0] for row in table.lines[1:]] == [each.dataset for each in report.other_texts]
        for each, row in zip(report.other_texts, table.lines[1:], strict=True):
            found = each.variants[table.title]
            assert row[3].startswith(f"{found.kl.value:.2g} [")
            assert row[4] == found.differs
            assert row[5].startswith(f"{found.clipped.share:.2%} [")
            worst = max(found.layers, key=lambda layer: layer.exceedance.events)
            if worst.exceedance.events:
                share = worst.exceedance.share
                assert row[6].startswith(f"layer {worst.layer_idx}: {share:.2%} (")
            assert row[5].split(" [")[0] in page


def test_tokens_that_were_not_counted_for_clipping_are_said(report):
    name, tokens = other_text_tables(report)[0].title, report.data.tokens
    row = report.variants[name]
    for counted, said in ((tokens, f"{tokens:,}"), (7, f"{tokens:,} (clipped: of 7)")):
        clipped = row.clipped.model_copy(update={"tokens": counted})
        variants = {**report.variants, name: row.model_copy(update={"clipped": clipped})}
        tables = other_text_tables(report.model_copy(update={"variants": variants}))
        assert tables[0].lines[0][2] == said


def test_a_report_without_other_text_says_nothing_of_it(report):
    plain = report.model_copy(update={"other_texts": []})
    assert "Other text" not in render_html(plain)
    assert "Other text" not in render_markdown(plain)


def test_an_older_report_is_read_and_written(report):
    document = report.to_json()
    del document["other_texts"]
    for row in document["variants"].values():
        row.pop("clipped", None)
        for layer in row.get("layers", []):
            del layer["exceedance"]
    older = Report.model_validate(document)
    assert older.to_json() == document
    assert render_html(older)


def test_a_difference_of_means_is_resampled_on_both_sides():
    rng = np.random.default_rng(1)
    here = [rng.normal(2.0, 1.0, 50) for _ in range(40)]
    there = [rng.normal(1.0, 1.0, 30) for _ in range(30)]
    found = difference(here, there)
    assert found.value == pytest.approx(np.concatenate(here).mean() - np.concatenate(there).mean())
    assert found.low < found.value < found.high
    # variances of two means of 2,000 and 900 values add up; 1,000 resamples are within 10 %
    expected = 2 * 1.96 * (1 / 2000 + 1 / 900) ** 0.5
    assert found.high - found.low == pytest.approx(expected, rel=0.35)
    assert difference(there, here).value == -found.value


@pytest.mark.parametrize(
    ("ends", "largest", "answer"),
    [
        ((0.1, 0.3), 1.0, "higher"),
        ((-0.3, -0.1), 1.0, "lower"),
        ((-0.1, 0.3), 1.0, "no measurable difference"),
        ((0.1, 0.3), 0.01, "no measurable difference"),  # within the noise floor
    ],
)
def test_a_difference_is_one_where_zero_is_outside(ends, largest, answer):
    low, high = ends
    assert judge_difference(Figure(value=(low + high) / 2, low=low, high=high), largest, 0.01) == answer


def test_what_is_no_number_is_higher():
    nan = float("nan")
    assert judge_difference(Figure(value=nan, low=nan, high=nan), nan, 0.0) == "not finite"


def events(count, tokens=1000):
    low, high = poisson_interval(count)
    return Events(tokens=tokens, events=count, low=low / tokens, high=high / tokens)


@pytest.mark.parametrize(
    ("here", "own", "answer"),
    [
        (50, 10, True),
        (50, 40, False),  # the intervals overlap
        (9, 0, False),  # surely more, but under 1 %
        (600, 600, True),  # most tokens of every text
    ],
)
def test_a_text_is_named_where_it_is_clipped_more(here, own, answer):
    assert is_clipped(events(here), events(own)) == answer


@pytest.mark.parametrize(
    ("also", "phrase"),
    [
        (["builtin:wiki"], "no built-in dataset 'builtin:wiki'"),
        (["./gone.txt"], "no file or directory './gone.txt'"),
        (["random", "random"], "--also 'random' is given twice"),
        ([""], "the dataset's name is empty; give a .*.jsonl"),
        (["self"], "--also 'self' is what is evaluated on already; give another"),
    ],
)
def test_names_are_checked_before_anything_is_loaded(also, phrase):
    recipe = load_recipe(None, {"data.dataset": "self", "evaluation.also": also})
    with pytest.raises(InputError, match=phrase):
        check_evaluation(recipe, [])


def test_one_file_by_two_paths_is_one_dataset(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_words(tmp_path / "here/q.jsonl", ["w5"])
    (tmp_path / "link.jsonl").symlink_to("here/q.jsonl")
    for other in ("./q.jsonl", "../here/q.jsonl", str(tmp_path / "link.jsonl")):
        for own, also, phrase in (
            ("random", ["q.jsonl", other], f"--also '{other}' is given twice .also as 'q.jsonl'.;"),
            ("q.jsonl", [other], f"--also '{other}' is what is evaluated on already"),
        ):
            recipe = load_recipe(None, {"data.dataset": own, "evaluation.also": also})
            with pytest.raises(InputError, match=phrase):
                check_evaluation(recipe, [])


def test_what_was_named_and_cannot_be_had_is_refused(directory, texts, tmp_path):
    small = ("--dataset", texts[0], "--device", "cpu", "--seq-len", 24, "--samples", 2)
    done = fp8kv("eval", directory, *small, "--also", "builtin:chat")
    one_line_error(done, "--also 'builtin:chat': row ", "holds chats but the tokenizer has no")
    one = write_words(tmp_path / "one.jsonl", ["w9"], rows=1, length=24)
    done = fp8kv("eval", directory, *small, "--also", one)
    one_line_error(done, "one.jsonl' has 1 samples, and 2 are needed: use a larger dataset")
    done = fp8kv("eval", directory, *small, "--also", texts[1], "--variants", "channel")
    one_line_error(done, "--also is measured with scales that engines load: give --scales or keep")


def test_text_that_given_scales_have_read_is_skipped(directory, texts, tmp_path, recipe):
    out = tmp_path / "scales"
    small = ("--samples", 3, "--seq-len", 24, "--device", "cpu", "--quiet")
    made = fp8kv("calibrate", directory, "-o", out, "--dataset", texts[1], *small)
    assert made.exit_code == 0, made.stderr
    only = recipe.evaluation.model_copy(update={"also": (texts[1],), "variants": ("tensor",)})
    changed = recipe.model_copy(update={"evaluation": only})
    done = evaluate(str(directory), changed, suite=SUITE, scales=[out])
    (found,) = done.other_texts
    samples = found.text.data.samples
    assert [d.tolist() for d in found.text.documents] == samples[3:7]
    assert [*found.divergences] == ["reference", "tensor", "scales"]
