"""The kernel benchmark without a GPU: its gate, its report and others' masks; no speed."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8kv_runtime import reference
from fp8kv_runtime.bench import correctness as gate
from fp8kv_runtime.bench.cases import build, shrink
from fp8kv_runtime.cache import PagedSequences

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
REFERENCES = {
    name: getattr(reference, name) for name in ("append_kv", "decode_attention", "extend_attention")
}


@pytest.fixture
def bench(monkeypatch):
    """The script's modules."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import kernel_paged_peers
    import kernel_peers
    import kernel_speed

    return SimpleNamespace(paged=kernel_paged_peers, peers=kernel_peers, speed=kernel_speed)


def tiny(bench, kernel):
    return [case for case in shrink(bench.speed.CASES) if case.kernel == kernel]


@pytest.fixture
def run(bench, monkeypatch, tmp_path, capsys):
    """The command, on so many small cases of each kernel; it returns what it printed."""

    def run_command(*arguments, per_kernel=100):
        small = [tiny(bench, kernel)[:per_kernel] for kernel in REFERENCES]
        monkeypatch.setattr(bench.speed, "CASES", tuple(case for cases in small for case in cases))
        monkeypatch.setattr(sys, "argv", ["kernel_speed.py", "--output", str(tmp_path), *arguments])
        bench.speed.main()
        return capsys.readouterr().out

    return run_command


def test_tiny_checks_every_kernel_and_writes_nothing(run, tmp_path):
    *rows, last = run("--tiny", per_kernel=1).splitlines()
    assert last.startswith("correctness only: ")
    assert last.endswith("nothing was timed")
    assert {row.split()[0] for row in rows} == set(REFERENCES)
    assert all(" ok " in row for row in rows)
    assert not list(tmp_path.iterdir())


def scaled(run, *arguments, **options):
    return run(*arguments, **options) * 1.002


def not_a_number(run, *arguments, **options):
    out = run(*arguments, **options)
    out[0, 0, 0] = torch.nan
    return out


def heads_exchanged(run, *arguments, **options):
    return run(*arguments, **options).flip(1)


def last_token_forgotten(run, query, blocks, sequences, *arguments):
    shorter = PagedSequences(sequences.block_tables, sequences.seq_lens - 1)
    return run(query, blocks, shorter, *arguments)


@pytest.mark.parametrize("kernel", ["decode_attention", "extend_attention"])
def test_the_gate_refuses_broken_attention(bench, kernel):
    run = REFERENCES[kernel]
    for case in tiny(bench, kernel):
        assert gate.check(case, {kernel: run}, torch.device("cpu")).ok
        for broken in (scaled, not_a_number, heads_exchanged, last_token_forgotten):
            wrong = {kernel: partial(broken, run)}
            assert not gate.check(case, wrong, torch.device("cpu")).ok, (case.name, broken)


def one_token_skipped(key, value, blocks, slots):
    reference.append_kv(key[1:], value[1:], blocks, slots[1:])


def another_byte_written(key, value, blocks, slots):
    reference.append_kv(key, value, blocks, slots)
    blocks.codes.view(torch.uint8)[0, 0, 0, 0, 0] ^= 1


def counted_twice(key, value, blocks, slots):
    for _ in range(2):
        reference.append_kv(key, value, blocks, slots)


def test_the_gate_refuses_a_broken_append(bench):
    for case in tiny(bench, "append_kv"):
        broken = [one_token_skipped, another_byte_written, *([counted_twice] if case.count else ())]
        assert gate.check(case, REFERENCES, torch.device("cpu")).ok
        for append in broken:
            verdict = gate.check(case, {"append_kv": append}, torch.device("cpu"))
            assert not verdict.ok, append.__name__


class FakeTimer:
    """Runs everything once and takes ten microseconds for it."""

    repetitions = 30

    def __init__(self, timing):
        self._timing = timing

    def measure(self, work):
        for run in work.values():
            run()
        return {name: self._timing(10.0, 9.0, 12.5, True, 40.0) for name in work}

    def copy_bandwidth(self):
        return 4e12

    def floor(self):
        return 2.0


@pytest.fixture
def run_as_on_a_gpu(bench, run, monkeypatch):
    """The whole command with tiny shapes, references as launchers and a clock that stands still."""
    gpu = SimpleNamespace(
        name="NVIDIA H200", total_memory=2**27, multi_processor_count=132, uuid="no such GPU"
    )
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(bench.speed, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench.speed, "GpuTimer", lambda: FakeTimer(bench.speed.Timing))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)

    def run_with(launchers):
        monkeypatch.setattr(bench.speed, "load_launchers", lambda: launchers)
        return run()

    return run_with


def test_what_the_gpu_has_no_memory_for_is_left_out(bench, monkeypatch, capsys):
    cases = {case.name: case for case in bench.speed.CASES}
    small, large = cases["8 x 16k"], cases["128 x 8k"]
    gpu = SimpleNamespace(total_memory=24 * 2**30)  # an L4's
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    assert bench.speed.fitting((small, large)) == (small,)
    printed = capsys.readouterr().out
    assert printed.split(" left out: ")[1] == "32 GiB for K, V and their copies\n"
    gpu.total_memory = 139 * 2**30  # an H200's
    assert bench.speed.fitting(bench.speed.CASES) == bench.speed.CASES


def test_nothing_is_timed_after_a_mismatch(bench, run_as_on_a_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench.speed, "GpuTimer", None)  # cannot be called
    wrong = lambda *arguments: scaled(reference.decode_attention, *arguments)  # noqa: E731
    with pytest.raises(SystemExit, match="nothing was timed") as stopped:
        run_as_on_a_gpu(REFERENCES | {"decode_attention": wrong})
    assert stopped.value.code not in (0, None)
    rows = capsys.readouterr().out.splitlines()
    assert {row.split()[0] for row in rows if " WRONG " in row} == {"decode_attention"}
    assert not list(tmp_path.iterdir())


def test_results_say_what_was_measured(bench, run_as_on_a_gpu, tmp_path):
    run_as_on_a_gpu(REFERENCES)
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert [row["kernel"] for row in result["rows"]] == [c.kernel for c in bench.speed.CASES]
    machine = result["machine"]
    assert (machine["gpu"], machine["peak_tb_per_s"]) == ("NVIDIA H200", 4.8)
    assert machine["copy_tb_per_s"] == 4.0
    row = next(row for row in result["rows"] if row["case"] == "like 1 x 1k")
    num_bytes = 2 * 100 * 2 * 128  # K and V of 100 tokens and two heads of 128, a byte each
    assert row["bytes"] == num_bytes
    assert row["tb_per_s"] == pytest.approx(num_bytes / 10e-6 / 1e12)
    assert row["of_peak"] == pytest.approx(row["tb_per_s"] / 4.8)
    assert row["of_copy"] == pytest.approx(row["tb_per_s"] / 4.0)
    text = (tmp_path / "kernels.md").read_text()
    assert text.count("\n## ") == 3
    assert "| like 1 x 1k | 10.0 | 9.0 to 12.5 | 40.0 |" in text
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_a_machine_without_matplotlib_draws_nothing(run_as_on_a_gpu, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "benchmarks/kernel_roofline.py draws it elsewhere" in run_as_on_a_gpu(REFERENCES)
    assert not (tmp_path / "kernels.png").exists()
    assert (tmp_path / "kernels.json").exists()


def test_bytes_and_operations_of_the_shapes(bench):
    cases = {case.name: case for case in bench.speed.CASES}
    assert cases["8 x 32k"].num_bytes == 2 * 8 * 32768 * 8 * 128
    assert cases["2,048 tokens, 32 heads of 256"].num_bytes == 2 * 2048 * 32 * 256 * 3
    prompt = cases["prompt of 8k"]
    assert bench.speed.num_flops(prompt) == 4 * 32 * 128 * (8192 * 8193 // 2)
    ragged, even = cases["1 x 128k + 31 x 4k"], cases["32 x 8,064: the same, evenly"]
    assert sum(ragged.lengths) == sum(even.lengths)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_torch_attention_is_given_the_same_values_and_mask(bench):
    math = torch.nn.attention.SDPBackend.MATH
    for case in tiny(bench, "decode_attention") + tiny(bench, "extend_attention"):
        if case.q_fp8 or len(set(case.lengths)) > 1:
            continue
        inputs = build(case, torch.device("cpu"))
        key, value = bench.peers.contiguous(case, inputs)
        for run in (
            bench.peers.sdpa(case, inputs, key, value, math),
            bench.peers.flex(case, inputs, key, value, lambda attention, dynamic: attention),
        ):
            out = run().reshape(inputs.query.shape)
            assert gate.output_error(out, case, inputs) < 2e-3, case.name
