"""Token ids that the embedding has no row for are named before any forward pass."""

import json

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error

FLAGS = ["--samples", "2", "--seq-len", "16", "--device", "cpu", "--allow-few-tokens"]


@pytest.fixture
def extended(tiny_directory):
    """A tokenizer of 130 tokens for a model of 128; the last two are `w128` and `<new>`."""
    file = tiny_directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["w128"] = 128
    new = {**tokenizer["added_tokens"][0], "id": 129, "content": "<new>"}
    tokenizer["added_tokens"].append(new)
    file.write_text(json.dumps(tokenizer))
    return tiny_directory


@pytest.fixture
def rows(tmp_path):
    def write(*texts):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return ["--dataset", path]

    return write


@pytest.fixture
def _computes_nothing(monkeypatch):
    def fail(*_, **__):
        pytest.fail("the model ran")

    monkeypatch.setattr(torch.nn.functional, "embedding", fail)


SAID = ("130 tokens", "128 rows", "token id")


@pytest.mark.usefixtures("_computes_nothing")
@pytest.mark.parametrize("offload", ["none", "layerwise"])
@pytest.mark.parametrize("word", ["w128", "<new>"])
def test_calibrate(extended, rows, word, offload, tmp_path):
    data = rows("w5 w6 w7", f"w5 {word} w7")
    done = fp8kv("calibrate", extended, "-o", tmp_path / "out", *data, *FLAGS, "--offload", offload)
    one_line_error(done, *SAID)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("offload", ["none", "layerwise"])
def test_tokens_that_the_data_never_uses_do_no_harm(extended, rows, offload, tmp_path):
    data = rows("w5 w6 w7", "w5 w127 w7")
    done = fp8kv("calibrate", extended, "-o", tmp_path / "out", *data, *FLAGS, "--offload", offload)
    assert done.exit_code == 0, done.stderr


@pytest.mark.usefixtures("_computes_nothing")
def test_generate(extended):
    done = fp8kv("generate", extended, "w5 <new> w7", "--scales", "none", "--device", "cpu")
    one_line_error(done, *SAID)


@pytest.mark.usefixtures("_computes_nothing")
def test_eval(extended, rows, tmp_path):
    data = rows(*[f"w5 w{number} <new> " * 200 for number in range(3, 100)])
    done = fp8kv("eval", extended, *data, "--device", "cpu", "-o", tmp_path / "report")
    one_line_error(done, *SAID)


def test_samples_that_the_model_writes_start_where_it_can(extended, tmp_path):
    config = extended / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token": "<new>"}))
    done = fp8kv("calibrate", extended, "-o", tmp_path / "out", "--dataset", "self", *FLAGS)
    one_line_error(done, *SAID)


def test_samples_that_the_model_writes_need_no_row_for_padding(extended, tmp_path):
    config = extended / "tokenizer_config.json"
    said = {**json.loads(config.read_text()), "pad_token": "<new>"}
    outputs = []
    for pad in ("<pad>", "<new>"):
        config.write_text(json.dumps({**said, "pad_token": pad}))
        out = tmp_path / pad.strip("<>")
        flags = [*FLAGS, "--samples", "20", "--batch-size", "10"]
        done = fp8kv("calibrate", extended, "-o", out, "--dataset", "self", *flags)
        assert done.exit_code == 0, done.stderr
        outputs.append(json.loads((out / "fp8kv_calibration.json").read_text())["dataset"])
    assert outputs[0] == outputs[1]


def test_random_token_ids_have_rows(extended, tmp_path):
    assert calibrate(extended, "-o", tmp_path / "out").exit_code == 0
