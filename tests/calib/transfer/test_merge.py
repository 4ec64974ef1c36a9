"""Merged runs give the very scales of one run over all their data, or a clear refusal."""

import json
import shutil

import pytest
import torch
from apply_cases import copy, edited, report_of
from command_line import fp8kv, json_of, one_line_error, ran
from families import edit_json
from safetensors.torch import load_file

from calib.files.names import STATS_FILE
from calib.scales.stats import shift_curve
from calib.scales.stats_file import load_stats, save_stats


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    lines = [" ".join(f"w{3 + (7 * i + j * j) % 97}" for j in range(24)) for i in range(10)]
    for name, part in (("a", lines[:4]), ("b", lines[4:]), ("all", lines)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in part))
    return directory


def calibrated(model, dataset, out, *options):
    flags = ("--seq-len", 24, "--batch-size", 1, "--device", "cpu")
    flags += ("--observer", "mse", "--targets", "qkv", "--set", "means=true", *options)
    ran("calibrate", model, "--dataset", dataset, "-o", out, *flags)
    return out


@pytest.fixture(scope="module")
def halves(model, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return [calibrated(model, texts / f"{name}.jsonl", out / name) for name in "ab"]


def test_two_runs_are_one(model, texts, halves, tmp_path):
    calibrated(model, texts / "all.jsonl", tmp_path / "whole")
    assert "statistics of 240 tokens" in ran("merge", *halves, "-o", tmp_path / "merged").stdout
    for file in ("fp8kv_stats.safetensors", "model-fp8kv-scales.safetensors"):
        expected, found = (load_file(tmp_path / name / file) for name in ("whole", "merged"))
        assert expected.keys() == found.keys()
        others = [name for name in expected if not name.endswith(".curve")]
        assert all(torch.equal(found[name], expected[name]) for name in others)
    # the second run's tokens come after the first's, and the last amax is that of both
    first, second, joined = (load_stats(run).layers.values() for run in (*halves, tmp_path / "merged"))
    for a, b, both in zip(first, second, joined, strict=True):
        assert torch.equal(both.k.curve, torch.maximum(a.k.curve, shift_curve(b.k.curve, 96, 144)))
        assert torch.equal(both.k.curve.amax(1), both.k.amax.amax(1))
    report = report_of(tmp_path / "merged")
    assert (report["dataset"]["samples"], report["dataset"]["tokens"]) == (10, 240)
    # a merged output merges again
    third = calibrated(model, texts / "a.jsonl", tmp_path / "third", "--seed", 3)
    assert json_of("merge", tmp_path / "merged", third, "-o", tmp_path / "again")["tokens"] == 240 + 96
    # but not with what it has read already
    done = fp8kv("merge", tmp_path / "again", halves[1], "-o", tmp_path / "no")
    one_line_error(done, "have read the same data; merging them adds nothing")


def test_what_does_not_belong_together_is_refused(model, texts, halves, tmp_path):
    a, b = halves
    out = ("-o", tmp_path / "merged")
    one_line_error(fp8kv("merge", a, *out), "two or more calibrations")
    one_line_error(fp8kv("merge", a, a, *out), "have read the same data")
    one_line_error(fp8kv("merge", a, tmp_path, *out), "fp8kv_stats.safetensors; give a calibration's output")

    # one tensor of another size, which is not sampled for marks
    def edit(tensors):
        tensors["model.layers.0.mlp.down_proj.weight"] *= 30

    tuned = copy(model, tmp_path / "tuned", edit)
    revision = calibrated(tuned, texts / "b.jsonl", tmp_path / "revision")
    one_line_error(fp8kv("merge", a, revision, *out), "is of another model or revision than")
    one_line_error(fp8kv("merge", a, b, *out, "--model", tuned), "is of another model or revision than")
    marks, keys = report_of(b)["marks"], "layers.{}.self_attn.k_proj.weight"
    marks["tensors"][keys.format(0)] = marks["tensors"][keys.format(1)]
    changed = edited(b, tmp_path / "changed", marks=marks)
    one_line_error(fp8kv("merge", a, changed, *out), f"do not fit '{changed}'", keys.format(0))
    for setting, other, said in (
        ("means", "false", "means (True, False)"),
        ("data.skip_first", 1, "data.skip_first (0, 1); calibrate both with the same"),
    ):
        run = calibrated(model, texts / "b.jsonl", tmp_path / setting, "--set", f"{setting}={other}")
        one_line_error(fp8kv("merge", a, run, *out), f"captured with different {said}")
    broken = shutil.copytree(b, tmp_path / "broken")
    (broken / STATS_FILE).write_bytes((b / STATS_FILE).read_bytes()[:-50])
    one_line_error(fp8kv("merge", a, broken, *out), "cannot read statistics")
    assert not (tmp_path / "merged").exists()
    # no run is replaced by what is made of it
    for run in halves:
        done = fp8kv("merge", *halves, "-o", run, "--overwrite")
        one_line_error(done, f"would mix with the calibration in '{run}'")


def test_modules_that_counted_other_tokens_do_not_add_up(halves, tmp_path):
    """As of a run in which a layer was skipped at times: its scale would rest on less text."""
    stats = load_stats(halves[1])
    counts, odd = [(50, 60), *stats.counts()[1:]], shutil.copytree(halves[1], tmp_path / "odd")
    (odd / STATS_FILE).unlink()
    save_stats(stats.replace_tensors(stats.tensors(), counts), odd / STATS_FILE)
    for order in ((halves[0], odd), (odd, halves[0])):
        done = fp8kv("merge", *order, "-o", tmp_path / "merged")
        one_line_error(done, "model.layers.0.self_attn counted", "another share than in")
    # the same share in both adds up, and is said
    twin = edited(odd, tmp_path / "twin", dataset=report_of(odd)["dataset"] | {"fingerprint": "0" * 64})
    done = ran("merge", odd, twin, "-o", tmp_path / "merged")
    assert "only 100 of 288 tokens were counted in layer 0: the scales there" in done.stdout


def test_another_number_of_threads_and_warnings_of_the_data_are_named(halves, tmp_path):
    one, other = (shutil.copytree(half, tmp_path / half.name) for half in halves)
    edit_json(one / "fp8kv_calibration.json", threads=1, warnings=["what is said of the data"])
    for count, kept in ((1, 1), (2, None), (None, None)):
        edit_json(other / "fp8kv_calibration.json", threads=count)
        warnings = json_of("merge", one, other, "-o", tmp_path / f"merged-{count}")["warnings"]
        assert "what is said of the data" in warnings
        said = f"'{one}' was measured with 1 threads and '{other}' with 2"
        assert [line.startswith(said) for line in warnings if "threads" in line] == [True] * (count == 2)
        assert report_of(tmp_path / f"merged-{count}")["threads"] == kept
