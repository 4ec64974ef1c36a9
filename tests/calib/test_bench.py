"""`fp8kv bench`: what it checks without a GPU, what it prints with one, and what it refuses."""

import json
import os
import subprocess

import pytest
import torch
from command_line import CLI
from typer.testing import CliRunner

from calib import bench as facade
from calib.commands.app import app
from fp8kv_runtime.bench import correctness, session
from fp8kv_runtime.kernels import targets

RUNNER = CliRunner()


def fp8kv(*arguments):
    return RUNNER.invoke(app, ["bench", *arguments])


def test_without_a_gpu_the_kernels_are_checked_and_nothing_is_timed(tmp_path):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32, "head_dim": 16,
        "intermediate_size": 8, "vocab_size": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [*CLI, "bench", str(tmp_path)]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | hidden)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    *rows, last = done.stderr.splitlines()
    assert last == "no GPU that torch can use: checked at small shapes, nothing was timed"
    assert {row.split()[0] for row in rows} == {
        "append_kv", "decode_attention", "extend_attention"
    }  # fmt: skip
    assert all(" ok " in row for row in rows)
    assert sum(" float16 ok" in row for row in rows) == len(rows) / 2


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which everything takes 10 microseconds, and work on float16 takes 18."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(targets, "gpu_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(session, "check_cases", lambda *_: [])
    monkeypatch.setattr(session, "build", lambda case, device: case)
    monkeypatch.setattr(session, "call", lambda form, inputs, launchers: form)
    monkeypatch.setattr(
        session, "time_on_gpu", lambda run: 18.0 if getattr(run, "format", "") == "float16" else 10.0
    )
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **how: zeros(2, 2 * 10**4))


@pytest.mark.usefixtures("gpu")
def test_with_a_gpu_the_table_has_every_case():
    done = fp8kv("--heads", "32/8/128", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.output)
    assert (result["gpu"], result["copy_tb_per_s"]) == ("NVIDIA H200", pytest.approx(4e-3))
    rows = {row["case"]: row for row in result["rows"]}
    assert rows["8 x 16k"]["tb_per_s"] == pytest.approx(8 * 16384 * 2 * 8 * 128 / 10e-6 / 1e12)
    table = fp8kv("--heads", "32/8/128").output
    assert "NVIDIA H200: 32/8/128" in table
    assert table.count("1.80x") == len(rows)


@pytest.mark.usefixtures("gpu")
def test_a_job_runner_is_told_how_far_it_is_and_nothing_else():
    done = fp8kv("--json", "--progress", "json")
    last = json.loads(done.stderr.splitlines()[-1])
    count = len(json.loads(done.stdout)["rows"])
    said = [last[key] for key in ("event", "stage", "done", "total")]
    assert said == ["end", "time", count, count]


@pytest.mark.parametrize("progress", ["none", "json"])
def test_the_verdict_is_no_progress(progress, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def check_cases(cases, launchers, device, say, iterate):
        say("a case ", end="", flush=True)
        return []

    monkeypatch.setattr(session, "check_cases", check_cases)
    done = fp8kv("--progress", progress)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "no GPU that torch can use: checked at small shapes, nothing was timed\n"


@pytest.mark.usefixtures("gpu")
def test_the_machines_own_configs_are_named(monkeypatch, tmp_path):
    table = tmp_path / "tuning.json"
    monkeypatch.setenv("FP8KV_TUNING", str(table))
    assert json.loads(fp8kv("--json").stdout)["tuned"] is None
    table.write_text("{}")
    assert json.loads(fp8kv("--json").stdout)["tuned"] == str(table)


@pytest.mark.usefixtures("gpu")
def test_nothing_is_timed_where_a_kernel_is_wrong(monkeypatch):
    monkeypatch.setattr(session, "check_cases", lambda *_: ["decode_attention 1 x 1k"])
    done = fp8kv()
    assert done.exit_code == 2
    assert "wrong on this machine, nothing was timed: decode_attention 1 x 1k" in done.output


def test_a_kernel_that_is_wrong_is_named(monkeypatch):
    monkeypatch.setattr(
        correctness, "check", lambda case, *_: correctness.Verdict(case.format != "float16", "so it is")
    )
    cpu = torch.device("cpu")
    cases, lines = session.bench_cases((2, 1, 16), 16, cpu), []
    wrong = session.check_cases(cases, {}, cpu, lambda *words, **how: lines.append(*words))
    assert len(wrong) == len(cases)
    assert all(name.endswith("float16") for name in wrong)
    assert lines.count("WRONG so it is") == len(cases)


@pytest.mark.parametrize("text", ["", "32/8", "3/2/64", "0/0/64", "a/b/c", "32/8/128/1", "-4/2/64"])
def test_heads_that_are_none_are_refused(text):
    with pytest.raises(facade.InputError, match="query heads, KV heads and head_dim such as"):
        facade.parse_heads(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "4/2/300"], "head_dim 300 is more than the 256 that kernels handle"),
        (["no/such/config.json"], "no/such/config.json"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments, message):
    done = fp8kv(*arguments)
    assert done.exit_code == 2
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("fp8kv: ")
    assert message in last
