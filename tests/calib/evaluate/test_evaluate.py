"""Evaluations from end to end: figures as of plain transformers, other text, held-out text, mistakes."""

import json
import math
import random
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from evaluations import plain_comparison, plain_inputs
from fake_quant import fake_quantized
from families import save_model, tiny_model
from transformers import LlamaConfig

from calib.data import load_data
from calib.errors import InputError
from calib.evaluate import inputs
from calib.evaluate.inputs import fit_suite
from calib.evaluate.layer_errors import clipped_layer, count_events, poisson_interval
from calib.evaluate.other_text import is_clipped, judge_difference
from calib.evaluate.page.page import render_html, render_markdown, write_report
from calib.evaluate.page.tables import other_text_tables
from calib.evaluate.report import Events, Figure, Report, Suite
from calib.evaluate.run import check_evaluation, evaluate
from calib.evaluate.summarize import summarize
from calib.recipe import DataRecipe, EvaluationRecipe, load_recipe
from calib.scales.text_summary import FEW_TOKENS

pytestmark = pytest.mark.xdist_group("evaluate")


def assert_plain(evaluation, report, name, model, documents):
    """The figures are those of plain transformers that attend to rounded K and V."""
    variant = evaluation.measured[name].variant
    altered = partial(fake_quantized, model, variant.scales, tensors=variant.tensors)
    kl, agreed = zip(*(plain_comparison(model, altered(), ids) for ids in documents), strict=True)
    row = report["variants"][name]
    np.testing.assert_allclose(row["kl"]["value"], torch.cat(kl).mean().item(), rtol=0.02)
    assert row["top1_count"] == torch.cat(agreed).sum()


@pytest.mark.parametrize("name", ["none", "e5m2", "attn_head", "channel", "k only", "v only", "random"])
def test_kl_and_agreement_are_those_of_plain_transformers(name, small_evaluation, small_report, plain):
    assert_plain(small_evaluation, small_report, name, *plain)


def test_figures_of_a_real_model_are_those_of_plain_transformers(smollm2_directory):
    names = ["none", "e5m2", "tensor", "attn_head", "channel+k_center"]
    choices = {"data.dataset": "builtin:python-docs", "device": "cpu", "evaluation.variants": names}
    suite = Suite(4, 2, 128, 0, 0, (), (), 0)
    evaluation = evaluate("builtin:smollm2", load_recipe(None, choices), suite=suite)
    report = summarize(evaluation).to_json()
    for name in ("e5m2", "channel+k_center"):
        assert_plain(evaluation, report, name, *plain_inputs(evaluation))
    kl = {name: row["kl"]["value"] for name, row in report["variants"].items()}  # what is known of this model
    assert kl["e5m2"] > 2 * kl["tensor"]
    assert kl["channel+k_center"] < kl["attn_head"]
    assert all(0.001 < kl[name] < 0.05 for name in ("none", "tensor", "attn_head"))
    assert report["noise_floor"] < 1e-3


def eval_(*arguments):
    return fp8kv("eval", "--dataset", "random", *arguments, "--device", "cpu")


@pytest.mark.usefixtures("small_suite")
def test_a_command_and_a_recipe_print_write_and_fail(small_directory, tmp_path):
    recipe, out = tmp_path / "gated.yaml", tmp_path / "mine"
    recipe.write_text(
        "strategy: attn_head\n"
        "data: {dataset: random}\n"
        "evaluation: {variants: [tensor], fail_if: ['kl_mean<1e9', 'tensor:top1<0']}\n"
    )
    done = calibrate(small_directory, "--recipe", recipe, "-o", out, "--evaluate", "--json")
    report = json.loads(done.stdout)["evaluation"]
    assert list(report["variants"]) == ["reference", "bf16", "eager", "tensor", "mine"]
    assert json.loads((out / "evaluation/report.json").read_text()) == report
    assert (out / "model.safetensors.index.json").exists()
    for flag in ("--json", "--quiet"):
        plain = succeeded(calibrate(small_directory, "--recipe", recipe, "-o", out, "--overwrite", flag))
        said = json.loads(plain.stdout)["warnings"] if flag == "--json" else plain.stderr.splitlines()
        assert "the recipe's evaluation.fail_if was not checked; --evaluate" in said[-1]
    # the same gates with the evaluation alone
    again = fp8kv("eval", small_directory, "--device", "cpu", "--recipe", recipe, "--scales", out)
    gated = eval_(small_directory, "--scales", out, "-o", tmp_path / "report", "--fail-if", "kl<1e9")
    for each in (done, again, gated):
        assert each.exit_code == 1
        assert "failed: mine: kl is " in each.stderr
        assert "tensor: top1" not in each.stderr
    assert "advice: " in gated.stdout
    assert gated.stdout.endswith(f"report written to {tmp_path / 'report' / 'report.html'}\n")
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert (report["schema"], report["variants"]["mine"]["what"]) == (1, "given with --scales")
    assert "| mine |" in (tmp_path / "report/report.md").read_text()
    gate = ("--variants", "tensor", "--fail-if", "tensor:kl>1e9")
    passed = json_of("eval", small_directory, "--dataset", "random", *gate)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert (passed["data"]["documents"], passed["recipe"]["device"]) == (4, device)


def test_calibrate_says_where_its_report_is(small_directory, small_report, tmp_path, monkeypatch):
    def run(*_, output, **__):
        report = Report.model_validate(small_report)
        return report, write_report(report, output)

    monkeypatch.setattr("calib.evaluate.run.run_evaluation", run)
    gate = ("--set", "evaluation.fail_if=[kl>9]")
    done = calibrate(small_directory, "-o", tmp_path / "out", "--evaluate", *gate)
    assert "fail_if was not checked" not in done.stdout + done.stderr
    assert done.stdout.endswith(f"report written to {tmp_path / 'out/evaluation/report.html'}\n")


@pytest.mark.usefixtures("small_suite")
def test_mistakes_get_one_line_before_the_model_is_loaded(small_directory, tmp_path, monkeypatch):
    def stop(_, recipe, **__):
        raise InputError(f"reads {recipe.data.dataset}")

    with monkeypatch.context() as patch:
        patch.setattr("calib.evaluate.run.run_evaluation", stop)
        (tmp_path / "r.yaml").write_text("save_minutes: 1")
        one_line_error(fp8kv("eval", small_directory, "--recipe", tmp_path / "r.yaml"), "builtin:python-docs")
    monkeypatch.setattr("calib.evaluate.run.load_model", lambda *_: pytest.fail("loaded"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/model.safetensors").touch()
    (tmp_path / "short.txt").write_text("w5 w6 w7\n")
    llama = save_model(tiny_model("llama"), tmp_path / "llama")
    succeeded(calibrate(llama, "-o", tmp_path / "scales", "--format", "fp8kv"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for flags, *phrases in (
        (("--variants", "none, tensr"), "--variants should be 'bf16'", "got 'tensr'"),
        (("--fail-if", "speed>1"), "fp8kv: --fail-if 'speed>1' is not a condition"),
        (("--scales", "own", "--fail-if", "x:kl>1"), "no variant 'x'; there are bf16, eager, none", ", own"),
        (("--fail-if", "tensor:kl>1", "--variants", "none"), "no variant 'tensor'; there are none, bf"),
        (("--fail-if", "reference:kl>1"), "no variant 'reference'"),
        (("--caches", "fp8_ds_mla"), "fp8_ds_mla holds latents (MLA), and this model caches K and V of"),
        (("--tasks", "./gone.yaml"), "--tasks './gone.yaml'", "No such file"),
        (("--seq-len", 999), "--seq-len 999 is longer than the model's 256"),
        (("--samples", 0), "--samples should be greater than or equal to 2, got 0"),
        (("--search", "much"), "--search should be a valid number", "got 'much'"),
        (("--scales", tmp_path), "holds no model"),
        (("--scales", tmp_path / "none"), "none' is not a dir"),
        (("--scales", tmp_path, "--scales", tmp_path), "is given twice; give every directory once"),
        (("--variants", "tensor", "-o", tmp_path / "full"), "which is not a report"),
        (("--scales", tmp_path / "scales"), "is of another model", "model_type llama"),
        (("--dataset", tmp_path / "gone.txt"), "no file or directory"),
        (("--dataset", tmp_path / "short.txt"), "1 sample, and 7 are needed, 3 of them to calibrate on"),
        (("--backend", "triton"), "--backend triton: its kernels need a GPU"),
    ):
        one_line_error(eval_(small_directory, *flags), *phrases)


def test_calibrate_refuses_at_once_what_its_evaluation_refuses(small_directory, tmp_path, monkeypatch):
    monkeypatch.setattr("calib.job.find_model", lambda *_: pytest.fail("it began"))
    for setting, said in (
        ("tasks=[hellaswagg]", "lm-eval has no task 'hellaswagg'; did you mean hellaswag"),
        ("dataset=gone.txt", "no file or directory 'gone.txt'"),
        ("seq_len=999", "--seq-len 999 is longer than the model's 256"),
    ):
        flags = ("-o", tmp_path / "mine", "--evaluate", "--set", f"evaluation.{setting}")
        one_line_error(calibrate(small_directory, *flags), said)
        assert not (tmp_path / "mine").exists()


def test_the_suites_length_is_cut_to_the_models_positions():
    suite, (warning,) = fit_suite(LlamaConfig(max_position_embeddings=64), EvaluationRecipe(), None)
    assert (suite.documents, suite.seq_len) == (8, 64)
    assert "cut to the model's 64 positions; the default is 256 tokens" in warning


SMALL = ("--seq-len", 24, "--device", "cpu")


def write(path, seeds, numbers=range(3, 128), each=1):
    """A dataset of rows of 50 words of these `numbers`, one of each seed, `each` in a document."""
    rows = [" ".join(f"w{i}" for i in random.Random(seed).choices(numbers, k=50)) for seed in seeds]
    joined = (" ".join(rows[i : i + each]) for i in range(0, len(rows), each))
    Path(path).write_text("".join(json.dumps({"text": text}) + "\n" for text in joined))
    return str(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two texts that share no word."""
    directory = tmp_path_factory.mktemp("texts")
    texts = (("own.jsonl", range(3, 30)), ("other.jsonl", range(60, 120)))
    return [write(directory / name, range(24), numbers) for name, numbers in texts]


@pytest.fixture(scope="module")
def evaluation(small_directory, texts):
    choices = {"data.dataset": texts[0], "device": "cpu", "dtype": "float32"}
    asked = {"evaluation.variants": ["none", "tensor", "attn_head", "channel"]}
    recipe = load_recipe(None, choices | asked | {"evaluation.also": [texts[1], "all"]})
    return evaluate(str(small_directory), recipe, suite=Suite(4, 4, 24, 0, 0, (), (), 2))


@pytest.fixture(scope="module")
def report(evaluation):
    return summarize(evaluation)


def test_every_built_in_text_is_read_beside_the_named(report, texts):
    found = {each.dataset: (each.documents, each.tokens) for each in report.other_texts}
    shorts = (texts[1], "builtin:python-docs", "builtin:code", "builtin:script", "random")
    assert found == dict.fromkeys(shorts, (4, 4 * 24)) | {"builtin:long": (2, 2 * 4 * 24)}
    (left_out,) = (line for line in report.warnings if line.startswith("--also"))
    assert left_out.startswith("--also all: 'builtin:chat' is left out: row ")
    assert "holds chats but the model has no chat template" in left_out
    assert not any("finite" in line or "None" in line for line in report.warnings)
    # scales that engines load; `channel` they do not
    assert all([*each.variants] == ["none", "tensor", "attn_head"] for each in report.other_texts)


def test_kl_and_clipped_tokens_are_those_of_the_documents(evaluation, report, texts):
    measured, text = evaluation.other_texts[0], report.other_texts[0]
    data = DataRecipe(dataset=texts[1], samples=4, seq_len=24)
    samples = load_data(data, evaluation.setup.tokenizer, None).samples
    assert [piece.ids for piece in measured.text.pieces] == samples
    for name in ("attn_head", "none"):
        row, layers = text.variants[name], measured.clipped[name]
        mean = torch.cat([each.kl for each in measured.divergences[name]]).mean().item()
        assert row.kl.value == pytest.approx(mean, rel=1e-6)
        own = report.variants[name].kl.value
        assert row.difference.value == pytest.approx(mean - own, rel=1e-5, abs=1e-12)
        assert row.kl.low <= row.kl.value <= row.kl.high
        assert row.layers == [clipped_layer(idx, layer) for idx, layer in layers.items()]
        assert row.clipped == count_events(layers.values(), "kv")
    nll = torch.cat([each.nll for each in measured.divergences["reference"]]).double().mean()
    assert text.ppl == pytest.approx(nll.exp().item(), rel=1e-6)
    assert text.variants["attn_head"].clipped.events > 10  # words that the scales have never seen


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


def test_a_difference_is_one_where_zero_is_outside_and_a_text_is_named_where_it_is_clipped_more():
    for low, high, largest, answer in (
        (0.1, 0.3, 1.0, "higher"),
        (-0.3, -0.1, 1.0, "lower"),
        (-0.1, 0.3, 1.0, "no measurable difference"),
        (0.1, 0.3, 0.01, "no measurable difference"),  # within the noise floor
        (math.nan, math.nan, math.nan, "not finite"),
    ):
        assert judge_difference(Figure(value=(low + high) / 2, low=low, high=high), largest, 0.01) == answer
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
    write("q.jsonl", range(3))
    Path("link.jsonl").symlink_to("q.jsonl")
    for own, *also, phrase in (
        ("self", "builtin:wiki", "no built-in dataset 'builtin:wiki'"),
        ("self", "./gone.txt", r"no file or directory '\./gone\.txt'; give a \.jsonl, "),
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
    one_line_error(done, "--also 'builtin:chat': row ", "holds chats but the model has no")
    (tmp_path / "one.txt").write_text("w9 " * 24)
    done = fp8kv("eval", small_directory, *small, "--also", tmp_path / "one.txt")
    one_line_error(done, "one.txt' has 1 sample, and 2 are needed: use a larger dataset")
    done = fp8kv("eval", small_directory, *small, "--also", texts[1], "--variants", "channel")
    one_line_error(done, "--also is measured with scales that engines load: give --scales or keep")


READ, FRESH = range(40), range(100, 140)  # seeds of rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, two texts, and everything that is made of calibrations on the first of them."""
    place = tmp_path_factory.mktemp("held-out")
    save_model(tiny_model("llama", num_hidden_layers=2, hidden_size=32), place / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        write("a.jsonl", READ)
        write("b.jsonl", FRESH)
        small = ("--samples", 40, "--seq-len", 50, "--device", "cpu", "--dtype", "float32", "--quiet")
        for command in (
            ("calibrate", "model", "--dataset", "a.jsonl", "-o", "out", *small),
            ("calibrate", "model", "--dataset", "b.jsonl", "-o", "other", *small),
            ("merge", "other", "out", "-o", "merged"),
            ("apply", "out", "model", "-o", "applied"),
            ("pack", "out", "-o", "packed"),
            ("convert", "out", "--to", "sglang", "-o", "converted"),
            ("convert", "converted", "--to", "vllm", "-o", "back"),
            ("repair", "out", "--stats", "other", "--to", "vllm", "-o", "repaired"),
            ("bake", "model", "--scales", "out", "--for", "fp8", "-o", "baked"),
        ):
            ran(*command)
    return place


@pytest.fixture
def held_out(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setitem(inputs.SUITES, "quick", Suite(4, 4, 40, 0, 0, (), (), 1))

    def evaluate(text, *flags, scales=("out",), model="model"):
        given = [part for name in scales for part in ("--scales", name)]
        flags = ("--device", "cpu", "--variants", "tensor", "--json", *flags)
        return fp8kv("eval", model, "--dataset", text, *given, *flags)

    return evaluate


def test_text_that_was_calibrated_on_is_refused_however_it_is_given(held_out):
    Path("here").mkdir()
    Path("here/link.jsonl").symlink_to("../a.jsonl")
    shutil.copy("a.jsonl", "copy.json")
    write("order.jsonl", reversed(READ))
    write("pairs.jsonl", READ, each=2)
    write("again.jsonl", [*FRESH[:2], *READ, *READ])
    for text, *flags in (
        *(["a.jsonl"], ["here/link.jsonl"], ["copy.json"], ["order.jsonl"], ["pairs.jsonl"], ["again.jsonl"]),
        *(["a.jsonl", "--seed", 1], ["pairs.jsonl", "--seq-len", 80]),
    ):
        one_line_error(held_out(text, *flags), "'out' read ", "; use another dataset")
    one_line_error(held_out("b.jsonl", "--also", "copy.json"), "--also", "'out' read ")
    for scales in ("merged", "applied", "packed", "converted", "back", "repaired"):
        one_line_error(held_out("copy.json", scales=[scales]), f"'{scales}' read ")
    # and what a model was baked with
    one_line_error(held_out("copy.json", scales=[], model="baked"), "baked' read ")
    write("one.jsonl", [FRESH[0]] * 60)  # the evaluation does not measure what it calibrates on
    one_line_error(
        held_out("one.jsonl", scales=[]), "samples of 'one.jsonl' are new, ", "this evaluation read "
    )
    write("few.jsonl", [*FRESH[:1], READ[0], *FRESH[1:7]])
    one_line_error(
        held_out("few.jsonl"), "samples of 'few.jsonl' are new, and 4 are needed: 'out' read 1 other, "
    )


def test_what_was_read_is_left_out_and_scales_without_a_record_are_warned_of(held_out):
    few, line = json.loads(succeeded(held_out("b.jsonl", scales=["out", "converted"])).stdout)["warnings"]
    assert few == "an interval over 4 samples tells little: measure 8 or more"
    length = FEW_TOKENS // 4
    assert line.startswith("only 160 tokens were read, too few")  # by the evaluation itself
    assert line.endswith(f"; give --seq-len {length} or more")
    warnings = json.loads(held_out("b.jsonl", "--seq-len", length).stdout)["warnings"]
    assert f"choose a --dataset whose texts have {length} tokens or more" in " ".join(warnings)
    write("mixed.jsonl", [*READ, *FRESH[:20]])
    report = json.loads(succeeded(held_out("mixed.jsonl")).stdout)
    assert report["data"]["documents"] == 4
    (line,) = [line for line in report["warnings"] if "left out" in line]
    assert "samples of 'mixed.jsonl' are left out: 'out' was calibrated on that text" in line
    write("one.jsonl", [*FRESH[:9], READ[0], *FRESH[9:20]])
    report = json.loads(succeeded(held_out("one.jsonl")).stdout)
    assert "1 of 5 samples of 'one.jsonl' is left out" in " ".join(report["warnings"])
    record = Path(shutil.copytree("converted", "old"), "fp8kv_text.json")
    partial = json.dumps({"records": [None, *json.loads(record.read_text())["records"]]})
    for text, known in ((None, "no record"), (partial, "a record of only a part")):
        record.write_text(text) if text else record.unlink()
        warnings = json.loads(held_out("b.jsonl", scales=["old"]).stdout)["warnings"]
        assert [line for line in warnings if "record" in line] == [
            f"'old' has {known} of the text behind its scales, so some of the held-out text may not be new "
            "to it; calibrate again to record all of it"
        ]
    record.write_text('{"records": [{"salt": 1}]}')
    one_line_error(held_out("a.jsonl", scales=["old"]), "is damaged (records.0.")


def test_too_little_text_is_refused_as_calibrate_refuses_it(held_out, monkeypatch):
    monkeypatch.setitem(inputs.SUITES, "quick", Suite(3, 8, 16, 0, 0, (), (), 1))
    for command in ("eval", "recommend"):
        done = fp8kv(command, "model", "--device", "cpu", "--dataset", "b.jsonl")
        one_line_error(done, "48 tokens, ", "are too few to cal")
    succeeded(held_out("b.jsonl", "--allow-few-tokens", scales=[]))
