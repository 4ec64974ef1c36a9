"""Benchmarks of kernels and of whole models without a GPU: gates, reports, others' masks; no speed."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import generate_gpu
import kernel_speed
import pytest
import torch
from kernel_setting import nan_in_new_memory  # noqa: F401  for all tests here

from calib.bench import kernels as gate
from calib.bench.kernels import shrink
from fp8kv_runtime import reference
from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.kernels import attention

CPU, CASES = torch.device("cpu"), {case.name: case for case in kernel_speed.CASES}
REFERENCES = {n: getattr(reference, n) for n in ("append_kv", "decode_attention", "extend_attention")}


def tiny(kernel):
    return [case for case in shrink(kernel_speed.CASES) if case.kernel == kernel]


def another_byte_written(run, key, value, blocks, slots):
    run(key, value, blocks, slots)
    blocks.codes.view(torch.uint8)[0, 0, 0, 0, 0] ^= 1


def last_token_forgotten(run, query, blocks, sequences, *arguments, **options):
    return run(query, blocks, PagedSequences(sequences.block_tables, sequences.seq_lens - 1), *arguments)


def not_a_number(run, *arguments, **options):
    out = run(*arguments)
    out[0, 0, 0] = torch.nan
    return out


ATTENTION = {
    "scaled": lambda run, *arguments, **options: run(*arguments) * 1.002,
    "ours scaled, not torch's": lambda run, *arguments, **options: (
        run(*arguments) * (1.002 if options else 1)
    ),
    "parts joined wrongly": lambda run, *arguments, num_splits=1: (
        run(*arguments) * (1.002 if num_splits > 1 else 1)
    ),
    "not a number": not_a_number,
    "heads exchanged": lambda run, *arguments, **options: run(*arguments).flip(1),
    "last token forgotten": last_token_forgotten,
}
APPEND = {
    "one token skipped": lambda run, key, value, blocks, at: run(key[1:], value[1:], blocks, at[1:]),
    "another byte written": another_byte_written,
    "counted twice": lambda run, *arguments: (run(*arguments), run(*arguments)),
}


@pytest.mark.parametrize("kernel", REFERENCES)
def test_the_gate_refuses_broken_kernels(kernel):
    for case in tiny(kernel):
        assert gate.check(case, REFERENCES, CPU, also_split=True).ok
        for name, broken in (APPEND if kernel == "append_kv" else ATTENTION).items():
            is_wrong = case.count or name != "counted twice"
            launchers = {kernel: partial(broken, REFERENCES[kernel])}
            assert gate.check(case, launchers, CPU, also_split=True).ok != is_wrong, (case.name, name)


@pytest.fixture
def gpu(monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=139 * 2**30, multi_processor_count=132, uuid="0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    return gpu


@pytest.fixture
def run(gpu, monkeypatch, tmp_path, capsys):
    """The whole command with tiny shapes, any launchers and a clock that stands still; what it printed."""

    def measure(work, captures):
        for launch in work.values():
            launch()
        return dict.fromkeys(work, kernel_speed.Timing(10.0, 9.0, 12.5, True, 40.0))

    def run_with(launchers):
        monkeypatch.setattr(kernel_speed, "load_launchers", lambda: launchers)
        kernel_speed.main()
        return capsys.readouterr().out

    timer = SimpleNamespace(repetitions=30, measure=measure, copy_bandwidth=lambda: 4e12, floor=lambda: 2.0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(kernel_speed, "device", lambda: CPU)
    monkeypatch.setattr(kernel_speed, "GpuTimer", lambda: timer)
    monkeypatch.setattr(kernel_speed, "CASES", tuple(case for kernel in REFERENCES for case in tiny(kernel)))
    monkeypatch.setattr(sys, "argv", ["kernel_speed.py", "--output", str(tmp_path)])
    return run_with


def test_what_the_gpu_has_no_memory_for_is_left_out(gpu, capsys):
    assert kernel_speed.fitting(kernel_speed.CASES) == kernel_speed.CASES
    gpu.total_memory = 24 * 2**30  # an L4's
    small, large = CASES["8 x 16k"], CASES["128 x 8k"]
    assert kernel_speed.fitting((small, large)) == (small,)
    assert capsys.readouterr().out.endswith(" left out: 32 GiB for K, V and their copies\n")


def test_nothing_is_timed_after_a_mismatch(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernel_speed, "GpuTimer", None)  # cannot be called
    wrong = partial(ATTENTION["scaled"], reference.decode_attention)
    with pytest.raises(SystemExit, match="nothing was timed"):
        run(REFERENCES | {"decode_attention": wrong})
    rows = capsys.readouterr().out.splitlines()
    assert {row.split()[0] for row in rows if " WRONG " in row} == {"decode_attention"}
    assert not list(tmp_path.iterdir())


def test_results_say_what_was_measured_and_are_drawn_with_matplotlib_alone(run, monkeypatch, tmp_path):
    run(REFERENCES)
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert [row["kernel"] for row in result["rows"]] == [case.kernel for case in kernel_speed.CASES]
    machine = result["machine"]
    assert (machine["gpu"], machine["peak_tb_per_s"]) == ("NVIDIA H200", 4.8)
    assert machine["copy_tb_per_s"] == 4.0
    row = next(row for row in result["rows"] if row["case"] == "like 1 x 1k")
    num_bytes = 2 * 100 * 2 * 128  # K and V of 100 tokens and two heads of 128, a byte each
    assert (row["bytes"], row["tb_per_s"]) == (num_bytes, pytest.approx(num_bytes / 10e-6 / 1e12))
    assert row["of_peak"] == pytest.approx(row["tb_per_s"] / 4.8)
    assert row["of_copy"] == pytest.approx(row["tb_per_s"] / 4.0)
    text = (tmp_path / "kernels.md").read_text()
    assert text.count("\n## ") == 3
    assert "| like 1 x 1k | 10.0 | 9.0 to 12.5 | 40.0 |" in text
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "kernels.png").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "benchmarks/kernel_roofline.py draws it elsewhere" in run(REFERENCES)
    assert not (tmp_path / "kernels.png").exists()


def test_bytes_and_operations_of_the_shapes():
    assert CASES["8 x 32k"].num_bytes == 2 * 8 * 32768 * 8 * 128
    assert CASES["2,048 tokens, 32 heads of 256"].num_bytes == 2 * 2048 * 32 * 256 * 3
    assert kernel_speed.num_flops(CASES["prompt of 8k"]) == 4 * 32 * 128 * (8192 * 8193 // 2)
    ragged, even = CASES["1 x 128k + 31 x 4k"], CASES["32 x 8,064: the same, evenly"]
    assert sum(ragged.lengths) == sum(even.lengths)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which it times")
def test_without_a_gpu_models_are_compared_and_one_with_a_wrong_kernel_is_told(monkeypatch, tmp_path, capsys):
    config = json.loads((Path(generate_gpu.__file__).parent / "configs" / "smollm2-135m.json").read_text())
    small = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 192}
    (tmp_path / "smollm2.json").write_text(json.dumps(config | small))
    output = tmp_path / "result.json"
    arguments = ["--config", str(tmp_path / "smollm2.json"), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["generate_gpu.py", *arguments])
    generate_gpu.main()
    row, last = capsys.readouterr().out.splitlines()
    assert row.startswith("smollm2 ")
    assert last == "no GPU here: small models were compared, nothing was timed"
    right = attention.decode_attention
    monkeypatch.setattr(attention, "decode_attention", lambda *arguments: 10 * right(*arguments).flip(1))
    with pytest.raises(SystemExit, match="nothing was timed"):
        generate_gpu.main()
    assert not output.exists()
