"""Token ids that the embedding has no row for are named before any forward pass."""

import json

import pytest
import torch
from command_line import fp8kv, one_line_error, succeeded
from families import edit_json

FLAGS = ["--samples", "2", "--seq-len", "16", "--device", "cpu", "--allow-few-tokens"]


@pytest.fixture
def extended(tiny_directory):
    """A tokenizer of 130 tokens for a model of 128; the last two are `w128` and `<new>`."""
    file = tiny_directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["w128"] = 128
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 129, "content": "<new>"})
    file.write_text(json.dumps(tokenizer))
    return tiny_directory


@pytest.fixture
def run(extended, tmp_path):
    """Run a command on the model, with these rows of text as its data."""

    def run(command, *arguments, rows=()):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        data = ["--dataset", path] if rows else []
        return fp8kv(command, extended, *arguments, *data)

    return run


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        (("calibrate", *FLAGS), ["w5 w6 w7", "w5 w128 w7"]),
        (("calibrate", *FLAGS, "--offload", "layerwise"), ["w5 w6 w7", "w5 <new> w7"]),
        (("generate", "w5 <new> w7", "--scales", "none", "--device", "cpu"), []),
        (("eval", "--device", "cpu"), [f"w5 w{number} <new> " * 200 for number in range(3, 100)]),
    ],
    ids=["calibrate", "layerwise", "generate", "eval"],
)
def test_text_with_tokens_that_have_no_row_is_refused_before_the_model_runs(
    command, rows, run, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.nn.functional, "embedding", lambda *_, **__: pytest.fail("the model ran"))
    output = [] if command[0] == "generate" else ["-o", tmp_path / "out"]
    done = run(*command, *output, rows=rows)
    one_line_error(done, "130 tokens", "128 rows", "token id")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("offload", ["none", "layerwise"])
def test_tokens_that_the_data_never_uses_do_no_harm(run, offload, tmp_path):
    rows = ["w5 w6 w7", "w5 w127 w7"]
    succeeded(run("calibrate", "-o", tmp_path / "out", *FLAGS, "--offload", offload, rows=rows))


def test_samples_that_the_model_writes_need_a_row_to_start_with_and_none_for_padding(extended, run, tmp_path):
    outputs, flags = [], [*FLAGS, "--dataset", "self", "--samples", "20", "--batch-size", "10"]
    for pad in ("<pad>", "<new>"):
        edit_json(extended / "tokenizer_config.json", pad_token=pad)
        succeeded(run("calibrate", "-o", tmp_path / pad, *flags))
        outputs.append(json.loads((tmp_path / pad / "fp8kv_calibration.json").read_text())["dataset"])
    assert outputs[0] == outputs[1]
    edit_json(extended / "tokenizer_config.json", bos_token="<new>")
    done = run("calibrate", "-o", tmp_path / "out", *flags)
    one_line_error(done, "130 tokens", "128 rows", "token id")
