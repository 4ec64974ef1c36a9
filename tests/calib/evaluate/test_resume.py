"""An evaluation that was killed goes on to the report of one that nothing stopped; no other goes on."""

import json
import os
import re
import signal
import sys
import tracemalloc

import pytest
import torch
from command_line import fp8kv, one_line_error, ran
from processes import forked, one_thread  # noqa: F401

from calib.commands.app import main
from calib.evaluate.resume import SavedResults

pytestmark = pytest.mark.xdist_group("evaluate")


def run_until_killed(units, *arguments):
    """Run the command in a fork that kills itself after so many units of new work; return its exit status."""

    def work(rank):
        once, new = SavedResults.once, []

        def once_and_die(saved, work, *arguments, **options):
            saved.every_seconds = 0
            result = once(saved, lambda: (new.append(1), work(*arguments, **options))[1])
            if len(new) == units:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        SavedResults.once = once_and_die
        sys.argv = ["fp8kv", *map(str, arguments)]
        main()

    ((status, _),) = forked(1, work)
    return status


def report(directory):
    return json.loads((directory / "report.json").read_text()) | {"created": ""}


@pytest.mark.usefixtures("small_suite")
def test_a_killed_evaluation_goes_on_to_the_same_report_and_no_other_does(
    small_directory, tmp_path, monkeypatch
):
    scales, out = tmp_path / "scales", tmp_path / "out"
    ran(
        "calibrate",
        small_directory,
        "-o",
        scales,
        "--dataset",
        "random",
        "--device",
        "cpu",
        "--format",
        "json",
    )
    measured = (
        "--variants",
        "none,random",
        "--caches",
        "int8_per_token_head",
        "--also",
        "builtin:python-docs",
    )
    more = ("--scales", scales, "--search", 1e-9, "--set", "data.dataset=random", "--device", "cpu")
    command, saved = ("eval", small_directory, *measured, *more), tmp_path / ".out.evaluation.progress"
    ran(*command, "-o", tmp_path / "whole")
    assert not (tmp_path / ".whole.evaluation.progress").exists()
    assert run_until_killed(4, *command, "-o", out) == -signal.SIGKILL

    def refused(said, *flags):
        one_line_error(fp8kv(*command, "-o", out, "--resume", *flags), said)
        assert (saved.exists(), out.exists()) == (True, False)

    with monkeypatch.context() as patch:  # before text or model are loaded
        patch.setattr("calib.evaluate.run._load_model_and_text", lambda *_: pytest.fail("loaded"))
        refused(
            "of a run with another setting 'data.seed' (42, now 7), so --resume cannot go on", "--seed", 7
        )
        refused("another setting 'evaluation.attention'", "--attention", "fa3")
    with monkeypatch.context() as patch:
        patch.setattr(
            "calib.evaluate.run._load_model_and_text", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
        )
        goes_on = "progress is saved: the same command with --resume goes on"
        one_line_error(fp8kv(*command, "-o", out, "--resume"), f"terminated; {goes_on}")
        lost = "give --resume to go on, or delete that file to start again"
        one_line_error(fp8kv(*command, "-o", out, "--overwrite"), lost)
        assert saved.exists()
    refused("another setting 'dtype' (float32, now bfloat16)", "--dtype", "bfloat16")
    scale_file = scales / "kv_cache_scales.json"
    text = scale_file.read_text()
    scale_file.write_text(re.sub(r"(\d\.\d\d)\d", r"\g<1>9", text))
    refused("another set of scales in --scales")
    scale_file.write_text(text)
    with monkeypatch.context() as patch:
        patch.setattr("calib.capture.resume.versions", lambda _: {"torch": "1.0"})
        refused("another version of torch (2.")
    settings = small_directory / "generation_config.json"
    text = settings.read_text()
    settings.write_text(text.replace("{", '{"repetition_penalty": 5.0, ', 1))
    refused("another file beside the weights, so")
    settings.write_text(text)
    weights = small_directory / "model.safetensors"
    before = weights.stat().st_mtime_ns
    os.utime(weights, ns=(before, before + 1))
    refused("another state of the weight files")
    os.utime(weights, ns=(before, before))
    torch.set_num_threads(2)
    refused("another number of threads (1, now 2; see OMP_NUM_THREADS)")
    torch.set_num_threads(1)
    whole = saved.read_bytes()
    saved.write_bytes(whole[:-100] + bytes(100))
    refused("is damaged (its values are not those that were written); delete that file to start again")
    saved.write_bytes(whole)
    statuses = []
    while (statuses or [-signal.SIGKILL])[-1] == -signal.SIGKILL:
        statuses.append(run_until_killed(7, *command, "-o", out, "--resume", "--fail-if", "kl>9"))
    assert (len(statuses) > 2, statuses[-1]) == (True, 0)
    resumed, expected = report(out), report(tmp_path / "whole")
    assert resumed["recipe"]["evaluation"].pop("fail_if") != expected["recipe"]["evaluation"].pop("fail_if")
    assert resumed == expected
    assert not saved.exists()
    over = ran(*command, "-o", tmp_path / "over", "--resume")
    assert "--resume found no saved progress, and began at the start" in " ".join(over.stderr.split())
    one_line_error(fp8kv(*command, "--resume"), "--resume needs -o: results are saved beside the report")


@pytest.mark.usefixtures("small_suite")
def test_a_killed_recommendation_goes_on_with_another_budget_but_not_for_another_engine(
    small_directory, tmp_path, monkeypatch
):
    """Nor does it make again what it had written before it was killed, as it measured that."""
    out, served = tmp_path / "out", tmp_path / "served"
    command = (
        "recommend",
        small_directory,
        "--set",
        "data.dataset=random",
        "--samples",
        8,
        "--write",
        served,
    )
    assert run_until_killed(3, *command, "-o", out) == -signal.SIGKILL
    resumed = (*command, "-o", out, "--resume")
    one_line_error(fp8kv(*resumed, "--engine", "sglang"), "another --engine (None, now sglang), so")
    with monkeypatch.context() as patch:
        patch.setattr("calib.recommendation._measure_again", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        goes_on = "terminated; progress is saved: the same command with --resume goes on"
        one_line_error(fp8kv(*resumed, "--budget-kl", 1), goes_on)
    written = served.stat().st_ino, served.stat().st_mtime_ns
    one_line_error(fp8kv(*command, "-o", out), "is the progress of a run that was stopped; give --resume to")
    ran(*resumed, "--budget-kl", 1)
    assert (served.stat().st_ino, served.stat().st_mtime_ns) == written
    one_line_error(fp8kv(*command, "-o", tmp_path / "next", "--resume"), "exists; add --overwrite")
    ran(*command, "-o", tmp_path / "whole", "--budget-kl", 1, "--overwrite")
    assert report(out) == report(tmp_path / "whole")
    assert not (tmp_path / ".out.evaluation.progress").exists()


def test_results_are_once_in_memory_while_they_are_saved(tmp_path):
    saved = SavedResults(tmp_path / "results")
    saved.open({}, [])
    saved.begin({})
    tracemalloc.start()
    saved.once(lambda: torch.zeros(2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 2**22 < saved.path.stat().st_size < peak < 1.5 * 2**22
