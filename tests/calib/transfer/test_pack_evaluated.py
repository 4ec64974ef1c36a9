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


def test_figures_of_an_evaluation(evaluated, measured, tmp_path):
    pack = packed(measured, tmp_path / "pack", "--report", evaluated)
    rows = json.loads((evaluated / "report.json").read_text())["variants"]
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


def test_figures_of_other_scales(evaluated, model, tmp_path):
    other = calibrated(model, tmp_path / "other", "--headroom", "2")
    done = fp8kv("pack", other, "-o", tmp_path / "pack", "--report", evaluated)
    one_line_error(done, "has no figures of these scales; measure them: fp8kv-eval")
    done = fp8kv("pack", other, "-o", tmp_path / "pack", "--report", other / "config.json")
    one_line_error(done, "is not a report of this version of fp8kv-eval")
    # beside the calibration they are a warning
    shutil.copytree(evaluated, other / "evaluation")
    for report in (None, "{}", "not JSON"):
        if report:
            (other / "evaluation" / "report.json").write_text(report)
        done = ran("pack", other, "-o", tmp_path / "pack", "--overwrite")
        (line,) = done.stderr.splitlines()
        assert line.startswith("warning: packed without figures of an evaluation: ")
        assert str(other / "evaluation" / "report.json") in line
        assert manifest(tmp_path / "pack")["evaluation"] is None
        done = fp8kv("pack", other, "-o", tmp_path / "pack", "--overwrite", "--json")
        (warning,) = json.loads(done.stdout)["warnings"]
        assert line == f"warning: {warning}"


def test_the_place_of_the_data_is_hidden(evaluated, measured, tmp_path):
    report = shutil.copytree(evaluated, tmp_path / "report") / "report.json"
    document = json.loads(report.read_text())
    edit_json(report, data=document["data"] | {"source": "acme/rows.jsonl"})
    pack = packed(measured, tmp_path / "pack", "--report", report)
    assert manifest(pack)["evaluation"]["data"] == "rows.jsonl"
    assert "acme" not in (pack / "README.md").read_text()


def test_figures_beside_a_calibration_in_several_formats(model, evaluated, tmp_path, monkeypatch):
    out = calibrated(model, tmp_path / "several", "--format", "vllm", "--format", "tgi")
    shutil.copytree(evaluated, out / "evaluation")
    assert manifest(packed(out / "vllm", tmp_path / "pack"))["evaluation"]
    monkeypatch.chdir(out / "tgi")
    assert manifest(packed(".", tmp_path / "here"))["evaluation"]
