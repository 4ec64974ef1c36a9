"""Progress: what a log and a job runner are told, by a clock that the tests move."""

import io
import json
import sys
import threading

import pytest
from command_line import calibrate, fp8kv
from families import save_model, tiny_model

from calib.commands import progress_bar as module
from calib.commands.progress_bar import StageReporter, json_line, log_line, progress_bar, reporting
from calib.commands.terminal import ModelText, print_blocks


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def told(clock):
    """A job's progress, a log with a line every 30 seconds, and one with JSON every 5."""

    class Told:
        def __init__(self, line, every):
            self.stream = io.StringIO()
            self.reporter = StageReporter(self.stream, line, every, clock)
            self.progress = self.reporter.progress()

        @property
        def lines(self):
            return self.stream.getvalue().splitlines()

        @property
        def objects(self):
            return [json.loads(line) for line in self.lines]

    return {"text": Told(log_line, 30), "json": Told(json_line, 5)}


def test_a_log_is_told_of_a_stage_and_how_far_it_is_every_30_seconds(told, clock):
    told = told["text"]
    told.progress.stage("calibrate", 71168, "tokens")
    for _ in range(7):
        clock.now += 8
        told.progress.advance(4096)
    assert told.lines == [
        "calibrate",
        "calibrate: 16,384 of 71,168 tokens, 512 tokens/s, 2 min left",
    ]
    clock.now += 8
    told.progress.stage("write")
    told.reporter.end()
    assert told.lines[2:] == ["write"]


def test_a_stage_that_reports_nothing_says_how_long_it_takes(told, clock):
    told = told["text"]
    told.progress.stage("load")
    for seconds in (29, 1, 29, 1):
        clock.now += seconds
        told.reporter.look()
    assert told.lines == ["load", "load: 30 s", "load: 60 s"]


def test_a_job_runner_is_told_when_a_stage_begins_every_5_seconds_and_when_it_ends(told, clock):
    told = told["json"]
    told.progress.stage("load")
    clock.now += 2.5
    told.progress.stage("calibrate", 1000, "tokens")
    for _ in range(4):
        clock.now += 4
        told.progress.advance(250)
    told.reporter.end()
    load = {"stage": "load", "done": 0, "total": None, "unit": None, "rate": None, "eta_s": None}
    run = {"stage": "calibrate", "total": 1000, "unit": "tokens"}
    assert told.objects == [
        {"event": "begin", **load, "elapsed_s": 0},
        {"event": "end", **load, "elapsed_s": 2.5},
        {"event": "begin", **run, "done": 0, "rate": None, "eta_s": None, "elapsed_s": 0},
        {"event": "running", **run, "done": 500, "rate": 62.5, "eta_s": 8, "elapsed_s": 8},
        {"event": "running", **run, "done": 1000, "rate": 62.5, "eta_s": 0, "elapsed_s": 16},
        {"event": "end", **run, "done": 1000, "rate": 62.5, "eta_s": 0, "elapsed_s": 16},
    ]


def test_the_rate_is_that_of_the_last_minute_and_time_left_runs_while_nothing_is_said(told, clock):
    told = told["json"]

    def look():
        clock.now += 5
        told.reporter.look()
        return told.objects[-1]["rate"], told.objects[-1]["eta_s"]

    told.progress.stage("calibrate", 1000, "tokens")
    clock.now += 50  # the first batch compiles
    told.progress.advance(10)
    assert look() == (0.2, 4945)
    clock.now -= 5
    for _ in range(8):
        clock.now += 10
        told.progress.advance(100)
    assert look() == (10, 14)
    clock.now += 100
    assert look() == (10, 0)


def test_batches_that_take_longer_than_a_minute_have_a_rate_too(told, clock):
    told = told["text"]
    told.progress.stage("calibrate", 1000, "tokens")
    for _ in range(3):
        clock.now += 100
        told.progress.advance(200)
    assert told.lines[-1] == "calibrate: 600 of 1,000 tokens, 2 tokens/s, 3 min left"


@pytest.mark.parametrize(
    ("stage", "amount", "line"),
    [
        (("copy model.safetensors", 8e9, "bytes"), 2e9, "2.0 GB of 8.0 GB, 66.7 MB/s, 2 min left"),
        (("text", 12, "variants"), 1, "1 of 12 variants, 0.033 variants/s, 6 min left"),
        (("tasks", 4000, "documents"), 1, "1 of 4,000 documents, 0.033 documents/s, 33.3 h left"),
        (("evil\x1b[2J", 2, "documents"), 1, "1 of 2 documents, 0.033 documents/s, 30 s left"),
    ],
)
def test_units(stage, amount, line, told, clock):
    told = told["text"]
    told.progress.stage(*stage)
    clock.now += 30
    told.progress.advance(amount)
    assert told.lines[-1] == f"{stage[0]}: {line}".replace("\x1b", "\N{REPLACEMENT CHARACTER}")


def test_a_detail_is_in_the_lines_of_a_log_and_makes_none(told, clock):
    told = told["text"]
    told.progress.stage("calibrate", 100, "tokens")
    told.progress.detail("layer 1 of 2, batch 3 of 4")
    clock.now += 30
    told.progress.advance(50)
    assert told.lines[1].startswith("calibrate (layer 1 of 2, batch 3 of 4): 50 of 100 tokens")


def test_a_copied_file_is_one_stage(told, clock):
    told = told["json"]
    for _ in range(3):
        clock.now += 1
        told.progress.copied("model.safetensors", 10, 30)
    told.reporter.end()
    assert [(each["event"], each["done"]) for each in told.objects] == [("begin", 0), ("end", 30)]


def test_each_formats_copy_of_a_file_is_a_stage(tmp_path, monkeypatch):
    model = save_model(tiny_model("llama"), tmp_path / "tiny")
    formats = ("--format", "vllm", "--format", "tgi", "--weights", "copy")
    done = calibrate(model, "-o", tmp_path / "out", *formats, "--progress", "json")
    assert done.exit_code == 0, done.stderr
    told = map(json.loads, done.stderr.splitlines())
    copies = {x["stage"]: x for x in told if x["event"] == "end" and x["unit"] == "bytes"}
    assert [*copies] == ["copy vllm/model.safetensors", "copy tgi/model.safetensors"]
    size = (model / "model.safetensors").stat().st_size
    assert [(x["done"], x["total"]) for x in copies.values()] == [(size, size)] * 2


def test_items_are_counted_after_they_are_done(told):
    told = told["json"]
    assert [*told.progress.each("documents", "abc", "documents")] == ["a", "b", "c"]
    assert [*told.progress.each("none", [], "documents")] == []
    told.reporter.end()
    assert [each["done"] for each in told.objects] == [0, 3]


def test_the_thread_that_looks_is_gone_afterwards_and_an_error_ends_no_stage(told, clock):
    told, threads = told["json"], threading.enumerate()
    with pytest.raises(KeyError), reporting(told.reporter) as progress:
        progress.stage("load")
        assert len(threading.enumerate()) == len(threads) + 1
        raise KeyError
    assert threading.enumerate() == threads
    assert [each["event"] for each in told.objects] == ["begin"]


def test_the_thread_looks(told, clock, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0)
    told, looked = told["text"], threading.Event()
    monkeypatch.setattr(told.reporter, "look", lambda: looked.set())
    with reporting(told.reporter):
        assert looked.wait(60)


def test_nothing_is_said_after_the_end(told, clock):
    told = told["text"]
    with reporting(told.reporter) as progress:
        progress.stage("load")
    clock.now += 100
    told.reporter.look()
    progress.advance(3)
    assert told.lines == ["load"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_there_is_a_bar_of_the_stage_that_runs(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar() as progress:
        progress.stage("load")
        progress.stage("calibrate [bold]", 100, "tokens")
        progress.advance(50)
        progress.detail("layer 1")
    drawn = sys.stderr.getvalue()
    assert "calibrate [bold]" in drawn
    assert "50 of 100 tokens" in drawn


def test_a_stage_that_has_ended_ends_no_second_time(monkeypatch):
    """Each piece of generated text ends the stage; a bar on a plain terminal would print a line for it."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar() as progress:
        progress.stage("generate")
        for _ in range(12):
            progress.end()
    assert sys.stderr.getvalue().count("\n") <= 2


def test_text_of_a_model_is_printed_as_it_is(capsys):
    print_blocks([ModelText("\u6771\u4eac\u3000\u5927\u962a, 10\u00a0%"), "a\u3000b"])
    assert capsys.readouterr().out == "\u6771\u4eac\u3000\u5927\u962a, 10\u00a0%\na\ufffdb\n"


@pytest.mark.parametrize(
    "flags", [["--quiet"], ["--json"], ["--progress", "none"], ["--quiet", "--progress", "json"]]
)
def test_nothing_is_shown_where_nothing_is_wanted(flags, tiny_directory, tmp_path):
    done = calibrate(tiny_directory, "-o", tmp_path / "out", *flags)
    assert (done.exit_code, done.stderr) == (0, "")


def test_a_job_runner_gets_both_results_and_progress(tiny_directory, tmp_path):
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--json", "--progress", "json")
    assert json.loads(done.stdout)["tokens"] == 128
    objects = [json.loads(line) for line in done.stderr.splitlines()]
    ends = {each["stage"]: each for each in objects if each["event"] == "end"}
    assert [*ends] == ["load", "calibrate", "write"]
    assert ends["calibrate"]["done"] == ends["calibrate"]["total"] == 128


def stages(done):
    assert done.exit_code == 0, done.stderr
    objects = [json.loads(line) for line in done.stderr.splitlines()]
    for each in objects:
        if each["event"] == "end" and each["total"] is not None:
            assert each["done"] == each["total"], each
    return [each["stage"] for each in objects if each["event"] == "begin"]


def test_every_long_command_reports(tiny_directory, tmp_path):
    out, form = tmp_path / "out", ("--progress", "json")
    assert calibrate(tiny_directory, "-o", out, "--quiet").exit_code == 0
    other = tmp_path / "other"
    assert calibrate(tiny_directory, "-o", other, "--quiet", "--seed", 7).exit_code == 0
    done = fp8kv("apply", out, tiny_directory, "-o", tmp_path / "applied", *form)
    assert stages(done) == ["load", "compare weights", "write"]
    done = fp8kv("convert", out, "--to", "tgi", "-o", tmp_path / "converted", *form)
    assert stages(done) == ["write"]
    assert stages(fp8kv("strip", out, "-o", tmp_path / "plain", *form)) == ["write"]
    done = fp8kv("repair", out, "--stats", out, "-o", tmp_path / "repaired", *form)
    assert stages(done) == ["write"]
    done = fp8kv("merge", out, other, "-o", tmp_path / "merged", *form)
    assert stages(done) == ["load", "write"]
    rescaled = ["load", "choose factors", "write", "prove"]
    assert stages(fp8kv("stress", tiny_directory, "-o", tmp_path / "twin", *form)) == rescaled
    command = ("bake", tiny_directory, "--scales", out, "--for", "fp8", "-o", tmp_path / "baked")
    assert stages(fp8kv(*command, *form)) == rescaled
    done = fp8kv("generate", out, "w5 w6", "--max-new-tokens", 2, "--json", *form)
    assert stages(done) == ["load", "generate"]


def test_an_evaluation_reports(tiny_directory):
    small = ("--dataset", "random", "--samples", 2, "--seq-len", 32, "--device", "cpu")
    asked = ("--search", 0.01, "--also", "builtin:python-docs", "--progress", "json", "--json")
    done = fp8kv("eval", tiny_directory, *small, *asked)
    assert [name for name in stages(done) if "python-docs" not in name] == [
        *("load", "calibrate", "calibrate on random tokens", "documents", "per-layer errors"),
        *("text", "clipped values", "search: each layer alone", "search: 3 of 3 layers in FP8"),
    ]
