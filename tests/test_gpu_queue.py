"""`make gpu`: a queue whose steps fail, take too long or lack something; and the commands of the real one."""

import json
import re
import sys
from dataclasses import replace

import gpu_queue
import psutil
import pytest
from gpu_queue import ROOT, Step, read_queue, run_queue

GPU = {"gpu": "NVIDIA H200"}
STEPS = (
    Step("right", "echo $PYTHONPATH"),
    Step("wrong", "echo why >&2; exit 3"),
    Step("slow", "sleep 1234.5 & echo $! > OUT/pid; wait", limit=0.5),
    Step("lacking", "exit 4", ("json", "no_such_package", "!no-such-program")),
    Step("last", "PYTHON -c 'print(6 * 7)'", ("json", "!bash")),
)


def test_every_step_leaves_a_result_and_a_second_start_goes_on_where_the_first_ended(tmp_path, capsys):
    assert not run_queue(STEPS, tmp_path, GPU)
    first = [json.loads((tmp_path / step.name / "result.json").read_text()) for step in STEPS]
    assert [(result["step"], result["hardware"]) for result in first] == [(step.name, GPU) for step in STEPS]
    states = ["passed", "failed", "time limit", "needs no_such_package, !no-such-program", "passed"]
    ends = [*zip(states, (0, 3, None, None, 0), strict=True)]
    assert [(result["state"], result.get("exit")) for result in first] == ends
    # what it started ended too; a process that nobody waited for has no command
    live = {process.pid for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]}
    assert int((tmp_path / "slow/pid").read_text()) not in live
    path, *logs = ((tmp_path / name / "log.txt").read_text() for name in ("right", "wrong", "last"))
    assert (str(ROOT / "benchmarks") in path, logs) == (True, ["why\n", "42\n"])
    assert [line.split(" | ")[1] for line in (tmp_path / "README.md").read_text().splitlines()[2:]] == states
    (tmp_path / "last/result.json").unlink()  # as if it had been cut off
    capsys.readouterr()
    run_queue([replace(step, needs=()) for step in STEPS], tmp_path, GPU)
    before = "right: passed before\nwrong: failed before\nslow: time limit before\n"
    assert capsys.readouterr().out == f"{before}lacking ... failed\nlast ... passed\n"
    assert run_queue(STEPS[-1:], tmp_path, {"gpu": "another", "commit": "new"})
    assert capsys.readouterr().out == "last ... passed\n"
    assert run_queue(STEPS[:1], tmp_path / "new", GPU, minutes=1)  # a step may take eight
    assert capsys.readouterr().out == "right: too little of 1 minutes is left\nnot run: right\n"


def test_the_queue_names_what_exists_and_is_listed_without_a_gpu(tmp_path, monkeypatch, capsys):
    steps = read_queue()
    assert (len(steps) >= 25, max(step.limit for step in steps) <= 480) == (True, True)
    for step in steps:
        files = [ROOT / name for name in re.findall(r"\b(?:benchmarks|tools|tests)/[\w/.-]+", step.command)]
        assert [file for file in files if not file.exists()] == [], step.name
        source = "".join(file.read_text() for file in files[:1] if file.suffix == ".py")
        if source and "pytest" not in step.command:
            options = re.findall(r" (--[a-z-]+)", step.command.partition("benchmarks/")[2])
            assert [option for option in options if f'"{option}"' not in source] == [], step.name
    monkeypatch.setattr(sys, "argv", ["gpu_queue.py", "--dry-run", "--output", str(tmp_path)])
    gpu_queue.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [step.name for step in steps]
    monkeypatch.setattr(gpu_queue, "describe_hardware", dict)
    monkeypatch.setattr(sys, "argv", ["gpu_queue.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="torch finds no GPU here, so nothing was run"):
        gpu_queue.main()
    assert not any(tmp_path.iterdir())
