"""Progress: what a log and a job runner are told, by a clock that the tests move."""

import io
import json
import sys
import threading

import pytest
from command_line import SMALL, calibrate, fp8kv

from calib.commands import progress_bar as module
from calib.commands.progress_bar import StageReporter, json_line, log_line, progress_bar, reporting
from calib.commands.running import ModelText, print_blocks
from calib.evaluate.resume import SavedResults


class Told(io.StringIO):
    """What a log or a job runner is told every so many seconds, and the clock of it."""

    def __init__(self, line, every):
        super().__init__()
        self.now = 100.0
        self.progress = self.reporter = StageReporter(self, line, every, lambda: self.now)

    @property
    def lines(self):
        return self.getvalue().splitlines()

    @property
    def objects(self):
        return [*map(json.loads, self.lines)]

    def look_after(self, seconds):
        self.now += seconds
        self.reporter.look()

    def advance_after(self, seconds, amount):
        self.now += seconds
        self.progress.advance(amount)


def test_a_log_is_told_every_30_seconds_how_far_a_stage_is_and_nothing_of_a_shorter_one():
    log = Told(log_line, 30)
    log.progress.stage("calibrate", 71168, "tokens")
    for _ in range(7):
        log.advance_after(8, 4096)
    assert log.lines == ["calibrate: 16,384 of 71,168 tokens, 512 tokens/s, 2 min left"]
    log.now += 8
    log.progress.stage("write")
    log.reporter.end()
    log.progress.stage("load")  # a stage that reports nothing says how long it takes
    for seconds in (29, 1, 29, 1):
        log.look_after(seconds)
    assert log.lines[1:] == ["load: 30 s", "load: 60 s"]


def test_a_job_runner_is_told_when_a_stage_begins_every_5_seconds_and_when_it_ends():
    runner = Told(json_line, 5)
    runner.progress.stage("load")
    runner.now += 2.5
    runner.progress.stage("calibrate", 1000, "tokens")
    for _ in range(4):
        runner.advance_after(4, 250)
    runner.reporter.end()
    load = {"stage": "load", "done": 0, "total": None, "unit": None, "rate": None, "eta_s": None}
    run = {"stage": "calibrate", "total": 1000, "unit": "tokens"}
    assert runner.objects == [
        {"event": "begin", **load, "elapsed_s": 0},
        {"event": "end", **load, "elapsed_s": 2.5},
        {"event": "begin", **run, "done": 0, "rate": None, "eta_s": None, "elapsed_s": 0},
        {"event": "running", **run, "done": 500, "rate": 62.5, "eta_s": 8, "elapsed_s": 8},
        {"event": "running", **run, "done": 1000, "rate": 62.5, "eta_s": 0, "elapsed_s": 16},
        {"event": "end", **run, "done": 1000, "rate": 62.5, "eta_s": 0, "elapsed_s": 16},
    ]
    # a copied file is one stage, and items are counted after they are done
    for _ in range(3):
        runner.now += 1
        runner.progress.copied("model.safetensors", 10, 30)
    runner.reporter.end()
    assert [*runner.progress.each("documents", "abc", "documents")] == ["a", "b", "c"]
    assert [*runner.progress.each("none", [], "documents")] == []
    runner.reporter.end()
    ends = [("begin", 0), ("end", 30), ("begin", 0), ("end", 3)]
    assert [(each["event"], each["done"]) for each in runner.objects[6:]] == ends


def test_the_rate_is_that_of_the_last_minute_and_time_left_is_that_of_what_is_left_at_it():
    runner = Told(json_line, 5)

    def look_after(seconds):
        runner.look_after(seconds)
        return runner.objects[-1]["rate"], runner.objects[-1]["eta_s"]

    runner.progress.stage("calibrate", 1000, "tokens")
    runner.advance_after(50, 10)  # the first batch compiles
    assert look_after(5) == (0.2, 4950)
    runner.now -= 5
    for _ in range(8):
        runner.advance_after(10, 100)
    assert (look_after(5), look_after(105)) == ((10, 19), (10, 19))  # inside a batch, too


def test_what_an_earlier_run_did_is_counted_and_not_in_the_rate(tmp_path):
    runner = Told(json_line, 5)
    saved = SavedResults(tmp_path / "saved", True, _results=[1, 2])
    saved.begin({}, runner.progress)
    for _ in runner.progress.each("documents", range(5), "documents"):
        saved.once(lambda: runner.look_after(10))
    figures = [(x["done"], x["rate"], x["eta_s"]) for x in runner.objects if x["event"] == "running"]
    assert figures == [(2, None, None), (3, 0.1, 20), (4, 0.1, 10)]


def test_units():
    for stage, seconds, amount, line in (
        (("copy model.safetensors", 8e9, "bytes"), 30, 2e9, "1.87GiB of 7.46GiB, 64MiB/s, 2 min left"),
        (("tasks", 4000, "documents"), 30, 1, "1 of 4,000 documents, 0.033 documents/s, 33.3 h left"),
        (("evil\x1b[2J", 2, "documents"), 30, 1, "1 of 2 documents, 0.033 documents/s, 30 s left"),
        (("calibrate", 100, "tokens"), 30, 120, "120 of 100 tokens, 4 tokens/s, 0 s left"),
        # longer than the minute that a rate is of
        (("calibrate", 1000, "tokens"), 300, 600, "600 of 1,000 tokens, 2 tokens/s, 3 min left"),
    ):
        log = Told(log_line, 30)
        log.progress.stage(*stage)
        log.progress.detail("layer 1 of 2")
        for _ in range(3):
            log.advance_after(seconds / 3, amount / 3)
        name = f"{stage[0]} (layer 1 of 2)".replace("\x1b", "\N{REPLACEMENT CHARACTER}")
        assert log.lines[-1] == f"{name}: {line}"


def test_a_thread_looks_until_the_end_after_which_nothing_is_said_and_an_error_ends_no_stage(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0)
    log, looked, threads = Told(log_line, 30), threading.Event(), threading.enumerate()
    with monkeypatch.context() as patch, reporting(log.reporter) as progress:
        patch.setattr(log.reporter, "look", looked.set)
        progress.stage("load")
        assert looked.wait(60)
    log.look_after(100)
    progress.advance(3)
    assert log.lines == []
    runner = Told(json_line, 5)
    with pytest.raises(KeyError), reporting(runner.reporter) as progress:
        progress.stage("load")
        assert len(threading.enumerate()) == len(threads) + 1
        raise KeyError
    assert (threading.enumerate(), [each["event"] for each in runner.objects]) == (threads, ["begin"])


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_has_a_bar_of_the_stage_that_runs_and_no_line_for_each_end(term, monkeypatch):
    """Each piece of generated text ends the stage; a bar on a plain terminal would print a line for it."""
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar() as progress:
        progress.stage("load")
        progress.stage("calibrate [bold]", 100, "tokens")
        progress.advance(50)
        progress.detail("layer 1")
        for _ in range(12 if term == "dumb" else 0):
            progress.end()
    drawn = stream.getvalue()
    assert "calibrate [bold]" in drawn
    assert "50 of 100 tokens" in drawn
    assert term == "xterm" or drawn.count("\n") <= 2


def test_text_of_a_model_is_printed_as_it_is(capsys):
    print_blocks([ModelText("\u6771\u4eac\u3000\u5927\u962a, 10\u00a0%"), "a\u2028b"])
    assert capsys.readouterr().out == "\u6771\u4eac\u3000\u5927\u962a, 10\u00a0%\na\ufffdb\n"


FORM = ("--progress", "json")


def stages(done):
    """The names of the stages, each of which ended with all of it done."""
    assert done.exit_code == 0, done.stderr
    objects = [json.loads(line) for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    for each in objects:
        if each["event"] == "end" and each["total"] is not None:
            assert each["done"] == each["total"], each
    return [each["stage"] for each in objects if each["event"] == "begin"]


def test_every_long_command_reports_where_that_is_wanted(tiny_directory, tmp_path):
    out, other = tmp_path / "out", tmp_path / "--quiet"
    formats = ("--format", "vllm", "--format", "tgi", "--weights", "copy")
    done = calibrate(tiny_directory, "-o", tmp_path / "two", *formats, *FORM)
    # each format's copy of a file is one
    copies = ["copy vllm/model.safetensors", "copy tgi/model.safetensors"]
    assert [name for name in stages(done) if name.startswith("copy")] == copies
    done = calibrate(tiny_directory, "-o", out, "--json", *FORM)
    assert json.loads(done.stdout)["tokens"] == 128  # a job runner gets both results and progress
    assert stages(done) == ["load", "calibrate", "write"]
    assert '"done":128' in done.stderr.replace(" ", "")
    for flags in (["--json"], ["--progress", "none"], ["--quiet", *FORM, "--seed", 7]):
        done = calibrate(tiny_directory, "-o", tmp_path / flags[0], *flags)
        assert (stages(done), done.stderr != "") == ([], "none" in flags), flags  # which is of progress alone
    rescaled = ["load", "choose factors", "write", "prove"]
    also = ("--search", 0.01, "--also", "builtin:python-docs", "--json")
    commands = {
        ("apply", out, tiny_directory, "-o", tmp_path / "applied"): ["load", "compare weights", "write"],
        ("convert", out, "--to", "tgi", "-o", tmp_path / "converted"): ["write"],
        ("strip", out, "-o", tmp_path / "plain"): ["write"],
        ("repair", out, "--stats", out, "-o", tmp_path / "repaired"): ["write"],
        ("merge", out, other, "-o", tmp_path / "merged"): ["load", "write"],
        ("stress", tiny_directory, "-o", tmp_path / "twin"): rescaled,
        ("bake", tiny_directory, "--scales", out, "--for", "fp8", "-o", tmp_path / "baked"): rescaled,
        ("generate", out, "w5 w6", "--max-new-tokens", 2, "--json"): ["load", "generate"],
        ("eval", tiny_directory, *SMALL, *also): [
            *("load", "calibrate on the evaluation's own text", "calibrate on random tokens"),
            *("derive scales", "held-out text", "per-layer errors", "text"),
            *("clipped values", "search: each layer alone", "search: 3 of 3 layers in FP8"),
        ],
    }
    for command, expected in commands.items():
        found = [name for name in stages(fp8kv(*command, *FORM)) if "python-docs" not in name]
        assert found == expected, command[0]
