"""Figures of an evaluation in a pack: of these scales, or none."""

import json
import shutil

import pytest
from apply_cases import calibrated, manifest, packed
from command_line import fp8kv, one_line_error, ran
from families import edit_json


@pytest.fixture(scope="module")
def evaluated(model, measured, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluated") / "report"
    flags = ["--dataset", "random", "--samples", "3", "--seq-len", "24", "--variants", "none"]
    ran("eval", model, "--scales", measured, *flags, "--device", "cpu", "-o", out)
    return out


def test_figures_of_an_evaluation(evaluated, model, measured, tmp_path, monkeypatch):
    pack = packed(measured, tmp_path / "pack", "--report", evaluated)
    report = json.loads((evaluated / "report.json").read_text())
    rows = report["variants"]
    found = manifest(pack)["evaluation"]["variants"]
    for mine, theirs in {"these scales": measured.name, "scale 1.0": "none"}.items():
        assert found[mine] == {key: rows[theirs][key] for key in ("kl", "ppl_change", "top1")}
    card = (pack / "README.md").read_text()
    assert f"| these scales | {rows[measured.name]['kl']['value']:.2g} [" in card
    # taken by themselves where they lie beside the calibration, and not where they lie beside another
    given = shutil.copytree(measured, tmp_path / "given")
    shutil.copytree(evaluated, tmp_path / "evaluation")
    assert manifest(packed(given, tmp_path / "none"))["evaluation"] is None
    shutil.copytree(evaluated, given / "evaluation")
    assert manifest(packed(given, tmp_path / "taken"))["evaluation"]["variants"] == found
    # or beside the formats of one
    several = calibrated(model, tmp_path / "several", "--format", "vllm", "--format", "tgi")
    shutil.copytree(evaluated, several / "evaluation")
    source = {"source": "acme/rows.jsonl"}
    edit_json(several / "evaluation" / "report.json", data=report["data"] | source)
    monkeypatch.chdir(several / "tgi")
    pack = packed(".", tmp_path / "here")
    assert manifest(pack)["evaluation"]["data"] == "rows.jsonl"  # whose place is hidden
    assert "acme" not in (pack / "README.md").read_text()


def test_figures_of_other_scales(evaluated, model, tmp_path):
    other, out = calibrated(model, tmp_path / "other", "--headroom", "2"), tmp_path / "pack"
    for report, said in (
        (evaluated, "has no figures of these scales; measure them: fp8kv-eval"),
        (other / "config.json", "is not a report of this version of fp8kv-eval"),
    ):
        one_line_error(fp8kv("pack", other, "-o", out, "--report", report), said)
    # beside the calibration they are a warning
    shutil.copytree(evaluated, other / "evaluation")
    report = other / "evaluation" / "report.json"
    for text in (report.read_text(), "{}", "not JSON"):
        report.write_text(text)
        done = ran("pack", other, "-o", out, "--overwrite", "--json")
        (warning,) = json.loads(done.stdout)["warnings"]
        assert warning.startswith("packed without figures of an evaluation: ")
        assert str(report) in warning
        assert manifest(out)["evaluation"] is None
    done = ran("pack", other, "-o", out, "--overwrite")
    assert done.stderr.splitlines() == [f"warning: {warning}"]
