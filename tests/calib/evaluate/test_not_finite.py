"""Figures that are no finite numbers: null and a reason in JSON, words on pages, no gate passed."""

import ast
import json
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from command_line import fp8kv, ran
from evaluations import with_measured
from families import save_model, tiny_model

from calib.evaluate.page.page import render_html, render_markdown
from calib.evaluate.page.tables import summary_lines, variants_table
from calib.evaluate.report import Report
from calib.evaluate.summarize import summarize
from calib.evaluate.verdict import failures
from calib.files.strict_json import json_text
from calib.files.text import parse_condition

pytestmark = pytest.mark.xdist_group("evaluate")
ROOT = Path(__file__).parents[3]


def strict(text):
    """JSON as any reader takes it: Python's own would let NaN through."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"bare {word} in JSON"))


def spoiled(evaluation, names, number):
    """The report where the KL and likelihoods of three tokens of `names` are spoiled."""
    measured = dict(evaluation.measured)
    for name in names:
        first, *rest = measured[name].documents
        lost = first._replace(kl=first.kl.clone(), nll=first.nll.clone())
        lost.kl[:3] = lost.nll[:3] = number
        measured[name] = replace(measured[name], documents=[lost, *rest])
    return summarize(with_measured(evaluation, measured))


def words(*texts):
    # in data of pictures any letters may be
    text = re.sub(r"data:[^\"' ]+", "", "\n".join(texts))
    return re.findall(r"(?i)(?<![\w-])[-+]?(?:nan|inf)(?![\w-])", text)


def everything(report):
    rows = (" ".join(row) for row in variants_table(report).lines)
    return *summary_lines(report), *rows, render_markdown(report), render_html(report)


def test_one_cache_has_null_a_reason_and_passes_no_gate(small_evaluation):
    report = spoiled(small_evaluation, ["none"], math.inf)
    document = strict(json_text(report.to_json()))
    row = document["variants"]["none"]
    assert row["kl"] == {"value": None, "low": None, "high": None}
    assert row["ppl"] is None
    tokens = document["data"]["tokens"]
    reason = f"the KL of 3 of {tokens} tokens is not a finite number"
    assert row["not_finite"].startswith(reason)
    assert "not_finite" not in document["variants"]["tensor"]
    assert any(line.startswith(f"'none': {reason}") for line in document["warnings"])
    assert row["measurable"]
    assert document["advised"] not in (None, "none")
    assert not any("without scales" in line for line in document["advice"])
    assert words(*everything(report)) == []
    assert {row[0]: row[2] for row in variants_table(report).lines}["none"] == "not finite"

    read_back = Report.model_validate(document)
    assert strict(json_text(read_back.to_json())) == document
    for metric, operator, each in product(("kl", "kl_p99", "ppl_change"), "<>", (report, read_back)):
        text = f"{metric}{operator}0.5"
        lines = failures(parse_condition(text), each, ["none"])
        assert lines == [f"none: {metric} is not a finite number ({text})"]


def test_nothing_is_advised_where_nothing_has_a_kl(small_evaluation):
    report = spoiled(small_evaluation, list(small_evaluation.measured), math.nan)
    assert report.advised is None
    (advice,) = report.advice
    assert advice.startswith("Serve none of these caches: the KL is not a finite number with any")
    assert report.verdict.endswith("logits are not finite there.")
    (warning,) = [line for line in report.warnings if "finite" in line]
    assert warning.startswith("the model itself is broken on this text, whatever its cache: the KL")
    assert "no measurable difference" not in render_markdown(report)
    text = json_text(report.to_json())
    assert strict(text)["noise_floor"] is None
    assert words(*everything(report)) == []
    assert words(*everything(Report.model_validate(strict(text)))) == []


def test_reports_are_compared_that_hold_none(small_report, tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(small_report))
    lost = dict.fromkeys(("value", "low", "high"), "LOST")
    variants = small_report["variants"]
    tensor = variants["tensor"] | {"kl": lost, "ppl_change": lost}
    text = json.dumps(small_report | {"variants": variants | {"tensor": tensor}})
    for number in ("null", "NaN", "1e999"):
        bad.write_text(text.replace('"LOST"', number))
        for pair in ((good, bad), (bad, good), (bad, bad)):
            done = ran("compare", *pair)
            row = next(line for line in done.stdout.splitlines() if "tensor" in line)
            assert "not finite" in row
            assert "no measurable difference" not in row
            assert words(done.stdout) == []
            found = strict(fp8kv("compare", *pair, "--json").stdout)["variants"]["tensor"]
            assert (found["kl_ratio"], found["no_measurable_difference"]) == (None, False)
    # a page of an earlier report, and of this one, can be made
    assert words(render_html(Report.model_validate(json.loads(bad.read_text())))) == []


def test_a_model_whose_logits_are_no_numbers_has_a_report_and_keeps_16_bits(tmp_path):
    model, out = tiny_model("llama", num_hidden_layers=2, hidden_size=32), tmp_path / "report"
    model.lm_head.weight.data[0] = math.nan
    broken = save_model(model, tmp_path / "broken")
    few = ("--dataset", "random", "--samples", 3, "--seq-len", 24, "--device", "cpu")
    asked = ("--variants", "tensor,none", "--search", "0.1", "--also", "builtin:code")
    gates = ("--fail-if", "kl<0.5", "--fail-if", "top1<0.5")
    done = fp8kv("eval", broken, *few, *asked, *gates, "-o", out)
    assert isinstance(done.exception, SystemExit), done.exc_info
    assert done.exit_code == 1
    assert "failed: none: kl is not a finite number (kl<0.5)" in done.stderr
    assert "top1 is 0 (top1<0.5)" in done.stderr
    assert words(done.stdout, (out / "report.md").read_text(), (out / "report.html").read_text()) == []
    document = strict((out / "report.json").read_text())
    assert document["search"]["kl_of_all"] is None
    other = document["other_texts"][0]["variants"]["tensor"]
    assert (other["kl"]["value"], other["differs"]) == (None, "not finite")
    assert not any(" on builtin:code: " in line for line in document["warnings"])  # said of the model
    found = strict(ran("recommend", broken, *few, "--json").stdout)
    assert found["chosen"]["cache"] == "reference"
    passed = {(each["why"], each["kl"]["value"]) for each in found["passed"]}
    assert passed == {("its KL is not a finite number", None)}


def test_only_one_place_writes_json():
    """`json.dumps` writes NaN, which no other reader takes."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for package in ("calib", "fp8kv_runtime")
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("json.dumps", "json.dump", "dumps")
        and not any(k.arg == "allow_nan" and ast.unparse(k.value) == "False" for k in node.keywords)
    ]
    assert found == []
