"""`fp8kv bench`: heads of a config, what is checked without a GPU and printed with one, what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import fp8kv, one_line_error, succeeded
from families import LATENT, UNEVEN, tiny_model
from kernel_setting import nan_in_new_memory  # noqa: F401  for all tests here

from calib.bench import kernels as gate
from calib.bench.run import attention_heads, parse_heads
from calib.errors import InputError
from fp8kv_runtime.kernels import targets

CONFIGS, CPU = Path(__file__).parents[2] / "benchmarks" / "configs", torch.device("cpu")


def bench(*arguments):
    return fp8kv("bench", *arguments)


def write_config(directory, document, *architectures):
    config = document | {"architectures": architectures or ["XForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config, default=str))
    return str(directory)


def test_heads_of_configs_and_of_the_bundled_model(tmp_path):
    assert attention_heads(str(CONFIGS / "llama-3.1-8b.json")) == (32, 8, 128)
    assert attention_heads("builtin:smollm2") == (9, 3, 64)
    multi_query = tiny_model("gpt_bigcode").config.to_dict()
    heads, kv_heads, head_dim = attention_heads(write_config(tmp_path, multi_query, "GPTBigCodeForCausalLM"))
    assert (kv_heads, heads * head_dim) == (1, multi_query["n_embd"])


def test_models_without_k_and_v_of_one_shape_and_what_cannot_be_read_are_refused(tmp_path):
    latent = tiny_model("minicpm3", **LATENT["minicpm3"]).config.to_dict()
    uneven = tiny_model("gemma4_text", **UNEVEN["gemma4_text"]).config.to_dict()
    for document, said in (
        (latent, "minicpm3 caches latents (MLA), and the kernels are for K and V of heads; give"),
        (uneven, "have several shapes of heads (4/2/32 and 4/4/16); give the shape of one with --heads"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "no layer of XForCausalLM attends"),
        ({"model_type": "nonsense"}, "cannot read"),
    ):
        one_line_error(bench(write_config(tmp_path, document)), said)
    (tmp_path / "config.json").write_text("{")
    one_line_error(bench(tmp_path), "is not JSON")
    one_line_error(bench("no/such/config.json"), "no/such/config.json")
    one_line_error(bench("--heads", "4/2/300"), "head_dim 300 is more than the 256 that kernels handle")
    for text in ("", "32/8", "3/2/64", "0/0/64", "a/b/c", "32/8/128/1", "-4/2/64"):
        with pytest.raises(InputError, match="query heads, KV heads and head_dim such as"):
            parse_heads(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_kernels_are_checked_and_nothing_is_timed(monkeypatch):
    # a process in which nothing has imported Triton
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "calib", "bench", "--heads", "2/1/16"]
    done = subprocess.run(command, env=environment, cwd=CONFIGS.parents[1], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    *rows, last = done.stderr.splitlines()
    verdict = "no GPU that torch can use: checked at small shapes, nothing was timed"
    assert last == verdict
    assert {row.split()[0] for row in rows} == {"append_kv", "decode_attention", "extend_attention"}
    assert all(" ok " in row for row in rows)
    assert sum(" float16 ok" in row for row in rows) == len(rows) / 2
    monkeypatch.setattr(gate, "check_cases", lambda cases, launchers, device, say, iterate: say("a case"))
    for progress in ("none", "json"):
        done = bench("--progress", progress)
        assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"{verdict}\n")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which everything takes 10 microseconds, and work on float16 takes 18."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(targets, "gpu_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(gate, "check_cases", lambda *_: [])
    monkeypatch.setattr(gate, "build", lambda case, device: case)
    monkeypatch.setattr(gate, "call", lambda form, inputs, launchers: form)
    monkeypatch.setattr(gate, "time_on_gpu", lambda run, _=True: 18.0 if "float16" in repr(run) else 10.0)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **how: zeros(2, 2 * 10**4))
    torch.set_float32_matmul_precision("high")
    yield
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("gpu")
def test_with_a_gpu_the_table_has_every_case_and_progress_counts_them(monkeypatch, tmp_path):
    own_configs = tmp_path / "tuning.json"
    monkeypatch.setenv("FP8KV_TUNING", str(own_configs))
    table = bench("--heads", "32/8/128").output
    own_configs.write_text("{}")
    done = succeeded(bench("--heads", "32/8/128", "--json", "--progress", "json"))
    result = json.loads(done.stdout)
    assert (result["gpu"], result["copy_tb_per_s"]) == ("NVIDIA H200", pytest.approx(4e-3))
    assert result["tuned"] == str(own_configs)
    rows = {row["case"]: row for row in result["rows"]}
    assert rows["8 x 16k"]["tb_per_s"] == pytest.approx(8 * 16384 * 2 * 8 * 128 / 10e-6 / 1e12)
    last = json.loads(done.stderr.splitlines()[-1])
    assert [last[key] for key in ("event", "stage", "done", "total")] == ["end", "time", len(rows), len(rows)]
    assert "NVIDIA H200: 32/8/128" in table
    assert table.count("1.80x") == len(rows)
    own_configs.unlink()
    assert json.loads(bench("--json").stdout)["tuned"] is None
    monkeypatch.setattr(gate, "check_cases", lambda *_: ["decode_attention 1 x 1k"])
    one_line_error(bench(), "wrong on this machine, nothing was timed: decode_attention 1 x 1k")


def test_a_kernel_that_is_wrong_is_named(monkeypatch):
    verdict = gate.Verdict
    monkeypatch.setattr(
        gate, "check", lambda case, *_, also_split: verdict(case.format != "float16", "so it is")
    )
    cases, lines = gate.bench_cases((2, 1, 16), 16, CPU), []
    wrong = gate.check_cases(cases, {}, CPU, lambda *words, **how: lines.append(*words))
    assert len(wrong) == len(cases)
    assert all(name.endswith("float16") for name in wrong)
    assert lines.count("WRONG so it is") == len(cases)
