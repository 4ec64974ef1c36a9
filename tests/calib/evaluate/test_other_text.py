"""`--also`: the same scales on other text, what the report says of it, and what is refused."""

import json
import math
import random

import pytest
import torch
from command_line import fp8kv, one_line_error, ran

from calib.data import load_data
from calib.errors import InputError
from calib.evaluate.layer_errors import clipped_layer, count_events, poisson_interval, read_layers
from calib.evaluate.measure import compare_variants
from calib.evaluate.other_text import is_clipped, judge_difference
from calib.evaluate.page.page import render_html, render_markdown
from calib.evaluate.page.tables import other_text_tables
from calib.evaluate.report import Events, Figure, Report, Suite
from calib.evaluate.run import check_evaluation, evaluate
from calib.evaluate.summarize import summarize
from calib.recipe import DataRecipe, load_recipe

pytestmark = pytest.mark.xdist_group("evaluate")
VARIANTS = ["none", "tensor", "attn_head", "channel"]
SMALL = ("--seq-len", 24, "--device", "cpu")


def write_words(path, words):
    """A dataset of 24 documents of 40 of `words`."""
    rng = random.Random(0)
    lines = (" ".join(rng.choices(words, k=40)) for _ in range(24))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two texts that share no word."""
    paths = (tmp_path_factory.mktemp("texts") / name for name in ("own.jsonl", "other.jsonl"))
    words = ([f"w{i}" for i in numbers] for numbers in (range(3, 30), range(60, 120)))
    return [*map(write_words, paths, words)]


@pytest.fixture(scope="module")
def evaluation(small_directory, texts):
    choices = {"data.dataset": texts[0], "device": "cpu", "dtype": "float32", "evaluation.variants": VARIANTS}
    recipe = load_recipe(None, choices | {"evaluation.also": [texts[1], "all"]})
    return evaluate(str(small_directory), recipe, suite=Suite(4, 4, 24, 0, 0, (), (), 2))


@pytest.fixture(scope="module")
def report(evaluation):
    return summarize(evaluation)


def test_every_built_in_text_is_read_beside_the_named(report, texts):
    found = {each.dataset: (each.documents, each.tokens) for each in report.other_texts}
    shorts = (texts[1], "builtin:python-docs", "builtin:code", "builtin:script", "random")
    half_as_many = {"builtin:long": (2, 2 * 4 * 24)}
    assert found == dict.fromkeys(shorts, (4, 4 * 24)) | half_as_many
    (left_out,) = (line for line in report.warnings if line.startswith("--also"))
    assert left_out.startswith("--also all: 'builtin:chat' is left out: row ")
    assert "holds chats but the tokenizer has no chat template" in left_out
    assert not any("finite" in line or "None" in line for line in report.warnings)
    # scales that engines load; `channel` they do not
    assert all([*each.variants] == ["none", "tensor", "attn_head"] for each in report.other_texts)


@torch.inference_mode()
def test_kl_and_clipped_tokens_are_those_of_the_documents(evaluation, report, texts):
    setup, data = evaluation.setup, DataRecipe(dataset=texts[1], samples=4, seq_len=24)
    samples = [torch.tensor(ids) for ids in load_data(data, setup.tokenizer, None).samples]
    kept = [evaluation.measured[name].variant for name in ("attn_head", "none")]
    kl = [compare_variants(setup, ids, kept) for ids in samples]
    clipped, _ = read_layers(setup, samples, kept, with_errors=False)
    for variant in kept:
        row = report.other_texts[0].variants[variant.name]
        mean = torch.cat([each[variant.name].kl for each in kl]).mean().item()
        assert row.kl.value == pytest.approx(mean, rel=1e-6)
        own = report.variants[variant.name].kl.value
        assert row.difference.value == pytest.approx(mean - own, rel=1e-5, abs=1e-12)
        assert row.kl.low <= row.kl.value <= row.kl.high
        layers = clipped[variant.name]
        assert row.layers == [clipped_layer(idx, layer) for idx, layer in layers.items()]
        assert row.clipped == count_events(layers.values(), "kv")
    nll = torch.cat([each["reference"].nll for each in kl]).double().mean()
    assert report.other_texts[0].ppl == pytest.approx(nll.exp().item(), rel=1e-6)
    # words that the scales have never seen
    assert report.other_texts[0].variants["attn_head"].clipped.events > 10


def test_scales_with_a_quarter_of_the_room_clip_and_are_named(small_directory, texts, tmp_path):
    own, other = texts
    out = tmp_path / "tight"
    tight = ("--samples", 4, "--set", "headroom=0.25", "--allow-few-tokens", "--quiet")
    ran("calibrate", small_directory, "-o", out, "--dataset", own, *SMALL, *tight)

    wanted = ("--scales", out, "--dataset", own, "--variants", "tensor", "--also", other, "--samples", 4)
    done = ran("eval", small_directory, *wanted, *SMALL, "-o", tmp_path / "report")
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
                assert row[6].startswith(f"layer {worst.layer_idx}: {worst.exceedance.share:.2%} (")
            assert row[5].split(" [")[0] in page
    # of its own text fewer tokens may have been counted for clipping
    name, tokens = report.subject, report.data.tokens
    own = report.variants[name]
    for counted, said in ((tokens, f"{tokens:,}"), (7, f"{tokens:,} (clipped: of 7)")):
        clipped = own.clipped.model_copy(update={"tokens": counted})
        variants = report.variants | {name: own.model_copy(update={"clipped": clipped})}
        table, *_ = other_text_tables(report.model_copy(update={"variants": variants}))
        assert table.lines[0][2] == said
    # an older report is read and written and says nothing of other text
    document = report.to_json()
    del document["other_texts"]
    for row in document["variants"].values():
        row.pop("clipped", None)
        for layer in row.get("layers", []):
            del layer["exceedance"]
    older = Report.model_validate(document)
    assert older.to_json() == document
    assert "Other text" not in render_html(older) + render_markdown(older)


def test_a_difference_is_one_where_zero_is_outside_and_a_text_is_named_where_it_is_clipped_more():
    for low, high, largest, answer in (
        (0.1, 0.3, 1.0, "higher"),
        (-0.3, -0.1, 1.0, "lower"),
        (-0.1, 0.3, 1.0, "no measurable difference"),
        (0.1, 0.3, 0.01, "no measurable difference"),  # within the noise floor
        (math.nan, math.nan, math.nan, "not finite"),
    ):
        figure = Figure(value=(low + high) / 2, low=low, high=high)
        assert judge_difference(figure, largest, 0.01) == answer
    for count, own, answer in (
        (50, 10, True),
        (50, 40, False),  # the intervals overlap
        (9, 0, False),  # surely more, but under 1 %
        (600, 600, True),  # most tokens of every text
    ):
        events = (
            Events(tokens=1000, events=each, low=low / 1000, high=high / 1000)
            for each in (count, own)
            for low, high in [poisson_interval(each)]
        )
        assert is_clipped(*events) is answer


def test_names_are_checked_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_words(tmp_path / "q.jsonl", ["w5"])
    (tmp_path / "link.jsonl").symlink_to("q.jsonl")
    for own, *also, phrase in (
        ("self", "builtin:wiki", "no built-in dataset 'builtin:wiki'"),
        ("self", "./gone.txt", "no file or directory './gone.txt'"),
        ("self", "random", "random", "--also 'random' is given twice;"),
        ("self", "", "the dataset's name is empty; give a .*.jsonl"),
        ("self", "self", "--also 'self' is what is evaluated on already; give another"),
        # one file by two paths is one dataset
        ("random", "q.jsonl", "./q.jsonl", "--also './q.jsonl' is given twice .also as 'q.jsonl'.;"),
        ("q.jsonl", "link.jsonl", "--also 'link.jsonl' is what is evaluated on already"),
    ):
        recipe = load_recipe(None, {"data.dataset": own, "evaluation.also": [*also]})
        with pytest.raises(InputError, match=phrase):
            check_evaluation(recipe, [])


def test_what_was_named_and_cannot_be_had_is_refused(small_directory, texts, tmp_path):
    small = ("--dataset", texts[0], *SMALL, "--samples", 2)
    done = fp8kv("eval", small_directory, *small, "--also", "builtin:chat")
    one_line_error(done, "--also 'builtin:chat': row ", "holds chats but the tokenizer has no")
    (tmp_path / "one.txt").write_text("w9 " * 24)
    done = fp8kv("eval", small_directory, *small, "--also", tmp_path / "one.txt")
    one_line_error(done, "one.txt' has 1 samples, and 2 are needed: use a larger dataset")
    done = fp8kv("eval", small_directory, *small, "--also", texts[1], "--variants", "channel")
    one_line_error(done, "--also is measured with scales that engines load: give --scales or keep")
