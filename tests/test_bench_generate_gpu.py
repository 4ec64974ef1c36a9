"""The benchmark of whole models without a GPU: it compares, refuses, and computes its ratios."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8kv_runtime.kernels import decode

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CONFIG = BENCHMARKS / "configs" / "smollm2-135m.json"
SMALL = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 192}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which it times")


@pytest.fixture
def script(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import generate_gpu

    return generate_gpu


def run(script, monkeypatch, tmp_path):
    output, config = tmp_path / "result.json", tmp_path / "smollm2.json"
    config.write_text(json.dumps(json.loads(CONFIG.read_text()) | SMALL))
    arguments = ["generate_gpu.py", "--config", str(config), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    script.main()
    return output


def test_without_a_gpu_models_are_compared_and_nothing_is_written(script, monkeypatch, tmp_path, capsys):
    output = run(script, monkeypatch, tmp_path)
    *rows, last = capsys.readouterr().out.splitlines()
    assert last == "no GPU here: small models were compared, nothing was timed"
    assert [row.split()[0] for row in rows] == ["smollm2"]
    assert not output.exists()


def test_nothing_is_timed_where_a_kernel_is_wrong(script, monkeypatch, tmp_path):
    right = decode.decode_attention
    wrong = lambda *arguments: 10 * right(*arguments).flip(1)  # noqa: E731
    monkeypatch.setattr(decode, "decode_attention", wrong)
    with pytest.raises(SystemExit, match="nothing was timed"):
        run(script, monkeypatch, tmp_path)


def test_ratios_are_of_medians_and_steps_are_without_the_first_token(script):
    first = {"16-bit": [1.0, 9.0, 1.0], "fp8": [2.0, 2.0, 2.0]}
    last = {"16-bit": [7.0, 7.0, 9.0], "fp8": [5.0, 0.0, 5.0]}
    row = script._row(4096, 61, first, last)
    assert row["milliseconds_per_token"] == {"16-bit": 100.0, "fp8": 50.0}
    assert (row["ratio"], row["ratio_first_token"], row["ratio_per_token"]) == (7 / 5, 0.5, 2.0)


def test_a_measurement_takes_both_ways_in_turn(script, monkeypatch):
    """With a clock that knows how many tokens were asked for, and that FP8 takes half."""
    inside = []

    class Fp8:
        def __enter__(self):
            inside.append("fp8")

        def __exit__(self, *_):
            inside.pop()

    order = []

    def seconds(_model, prompt, new_tokens):
        assert prompt.shape == (1, 12)
        order.append("fp8" if inside else "16-bit")
        return (10 + new_tokens) / (2 if inside else 1)

    monkeypatch.setattr(script, "fp8_attention", lambda *_: Fp8())
    monkeypatch.setattr(script, "_seconds", seconds)
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=9), device="cpu")
    args = SimpleNamespace(rounds=2, new_tokens=5)
    row = script._measure(model, None, 12, args)
    assert row["ratio"] == row["ratio_per_token"] == row["ratio_first_token"] == 2.0
    assert order[::2] == ["fp8", "16-bit", "16-bit", "fp8", "fp8", "16-bit"]
    assert all(len(times) == 2 for times in row["all_seconds"]["first"].values())
