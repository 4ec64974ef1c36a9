"""Figures of an evaluation in a pack: of these scales, or none."""

import json
import shutil

import pytest
from apply_cases import calibrated
from command_line import fp8kv, one_line_error
from pack_cases import manifest, packed


@pytest.fixture(scope="module")
def evaluated(model, measured, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluated") / "report"
    flags = ["--dataset", "random", "--samples", "3", "--seq-len", "24", "--variants", "none"]
    done = fp8kv("eval", model, "--scales", measured, *flags, "--device", "cpu", "-o", out)
    assert done.exit_code == 0, done.stderr
    return out


def test_figures_of_an_evaluation(evaluated, measured, tmp_path):
    pack = packed(measured, tmp_path / "pack", "--report", evaluated)
    rows = json.loads((evaluated / "report.json").read_text())["variants"]
    found = manifest(pack)["evaluation"]["variants"]
    for mine, theirs in {"these scales": measured.name, "scale 1.0": "none"}.items():
        assert found[mine] == {key: rows[theirs][key] for key in ("kl", "ppl_change", "top1")}
    card = (pack / "README.md").read_text()
    assert f"| these scales | {rows[measured.name]['kl']['value']:.2g} [" in card


def test_figures_beside_the_calibration_are_taken(evaluated, measured, tmp_path):
    given = shutil.copytree(measured, tmp_path / "given")
    shutil.copytree(evaluated, given / "evaluation")
    assert manifest(packed(given, tmp_path / "pack"))["evaluation"]


def test_figures_of_other_scales(evaluated, model, tmp_path):
    other = calibrated(model, tmp_path / "other", "--headroom", "2")
    done = fp8kv("pack", other, "-o", tmp_path / "pack", "--report", evaluated)
    one_line_error(done, "has no figures of these scales; measure them: fp8kv-eval")
    done = fp8kv("pack", other, "-o", tmp_path / "pack", "--report", other / "config.json")
    one_line_error(done, "is not a report of this version of fp8kv-eval")


def test_figures_beside_the_calibration_of_other_scales(evaluated, model, tmp_path):
    other = calibrated(model, tmp_path / "other", "--headroom", "2")
    shutil.copytree(evaluated, other / "evaluation")
    for report in (None, "{}", "not JSON"):
        if report:
            (other / "evaluation" / "report.json").write_text(report)
        done = fp8kv("pack", other, "-o", tmp_path / "pack", "--overwrite")
        assert done.exit_code == 0, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("warning: packed without figures of an evaluation: ")
        assert str(other / "evaluation" / "report.json") in line
        assert manifest(tmp_path / "pack")["evaluation"] is None
        done = fp8kv("pack", other, "-o", tmp_path / "pack", "--overwrite", "--json")
        (warning,) = json.loads(done.stdout)["warnings"]
        assert line == f"warning: {warning}"


def test_figures_beside_a_calibration_in_several_formats(model, evaluated, tmp_path, monkeypatch):
    out = calibrated(model, tmp_path / "several", "--format", "vllm", "--format", "tgi")
    shutil.copytree(evaluated, out / "evaluation")
    assert manifest(packed(out / "vllm", tmp_path / "pack"))["evaluation"]
    monkeypatch.chdir(out / "tgi")
    assert manifest(packed(".", tmp_path / "here"))["evaluation"]


def test_what_lies_beside_a_calibration_in_one_format_is_not_its_own(model, measured, evaluated, tmp_path):
    given = shutil.copytree(measured, tmp_path / "given")
    shutil.copytree(evaluated, tmp_path / "evaluation")
    assert manifest(packed(given, tmp_path / "pack"))["evaluation"] is None
