"""`fp8kv verify --served`: a server with the scales, and one at 1.0."""

import json
import logging
import re
import time
from collections import Counter
from pydoc_data.topics import topics

import pytest
from command_line import calibrate, fp8kv, one_line_error, succeeded
from fake_server import SECRET, facts, serving, verify
from families import save_model, tiny_model

from calib.errors import InputError
from calib.evaluate.served.logprobs import decide


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, its twin, and both calibrated; the tokenizer knows words of the texts."""
    root = tmp_path_factory.mktemp("served")
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.data *= 6 if parameter.dim() == 2 else 1  # logits that depend on what is attended to
    tokenizer = save_model(model, root / "plain") / "tokenizer.json"
    document = json.loads(tokenizer.read_text())
    words = [word for word, _ in Counter(" ".join(topics.values()).split()).most_common(125)]
    document["model"]["vocab"] = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *words])}
    tokenizer.write_text(json.dumps(document))
    assert fp8kv("stress", root / "plain", "-o", root / "twin").exit_code == 0
    for name in ("plain", "twin"):
        assert calibrate(root / name, "-o", root / f"{name}-fp8kv").exit_code == 0
    return root


@pytest.fixture
def fake(made):
    """The twin, served with its scales."""
    return serving(made, "twin", "scales")


@pytest.fixture
def directory(made):
    return made / "twin-fp8kv"


@pytest.mark.parametrize(
    ("served", "prompt_logprobs"), [("scales", "given"), ("1.0", "ignored"), ("scales", "refused")]
)
def test_a_twin_tells(served, prompt_logprobs, made, directory):
    fake, start = serving(made, "twin", served), time.monotonic()
    fake.prompt_logprobs = prompt_logprobs
    fake.wait = lambda number: time.sleep(0.01)
    done = verify(fake, directory, "--json")
    found = facts(done)
    assert found["nearer"] == served
    assert done.exit_code == (served == "1.0")
    near, far = ("to_scales", "to_ones") if served == "scales" else ("to_ones", "to_scales")
    assert found[near] < 1e-5  # the very same computation
    assert found[far] == pytest.approx(found["apart"], rel=1e-3)
    assert found["noise"] == 0
    assert 0 < found["rounding"] < found["apart"] / 4
    assert found["of_prompt"] == (prompt_logprobs == "given")
    assert found["logprobs"] == (686 if found["of_prompt"] else 6 * 3)
    assert found["requests"] == len(fake.requests) - 1 <= 40  # and one to our plugin
    assert found["seconds"] > 0.01 * found["requests"]
    assert 0 < found["own_seconds"] < time.monotonic() - start - found["seconds"]


def test_a_text_says_which_and_by_how_much(made, fake, directory):
    done = succeeded(verify(fake, directory))
    lines = done.stdout.splitlines()
    assert lines[0] == "the server is nearer to the scales"
    far, apart = re.search(r"by 0.0000 nats .*, by (.+) from it at 1.0 \((.+) between", lines[1]).groups()
    assert float(far) == pytest.approx(float(apart), rel=1e-3, abs=1e-4) != 0
    assert "logprobs of 686 given tokens; 14 requests in" in lines[2]
    assert re.search(r" in \d+\.\d s, our own runs in \d+\.\d s\)$", lines[2])
    assert "most of the scales, or a 16-bit cache" in lines[3]
    prompts = [body["prompt"] for _, body in fake.requests[2:-1]]
    assert max(map(len, prompts)) == 128  # the server's 129, less the one generated
    assert len({tuple(ids) for ids in prompts}) == 6
    done = verify(serving(made, "twin", "1.0"), directory)
    assert done.exit_code == 1
    assert done.stdout.startswith("the server is nearer to 1.0\n")


def test_weights_may_lie_beside_the_scales(fake, made, tmp_path):
    assert calibrate(made / "twin", "-o", tmp_path / "out", "--format", "fp8kv").exit_code == 0
    fake.in_force = {"in_use": 3, "total": 4, "problems": ["rank 0: K is bad"], "fingerprint": "ab" * 16}
    done = verify(fake, tmp_path / "out", "--model", made / "twin", "--json")
    found = facts(done)
    assert (found["nearer"], found["plugin"], done.exit_code) == ("scales", fake.in_force, 1)


def test_answers_that_vary_or_of_a_model_that_needs_no_scales_or_of_another_tell_nothing(
    made, fake, directory
):
    done = verify(serving(made, "plain", "16 bits"), made / "plain-fp8kv")
    assert done.exit_code == 1
    assert done.stdout.startswith("cannot tell")
    assert f"fp8kv stress {made / 'plain-fp8kv'} -o twin" in done.stdout
    fake.noise = 2.0
    found = facts(verify(fake, directory, "--json"))
    assert found["nearer"] == "cannot tell"
    assert 1 < found["noise"] < 4
    fake.noise, fake.model, fake.scales = 0.0, tiny_model("gpt_neox"), None
    assert facts(verify(fake, directory, "--json"))["nearer"] == "cannot tell"


def test_what_is_wrong_is_said_before_a_server_is_asked_or_weights_are_read(
    made, fake, directory, tmp_path, monkeypatch
):
    monkeypatch.setattr("calib.evaluate.served.logprobs.load_model", lambda *_: pytest.fail("loaded"))
    one_line_error(verify(fake, made / "twin"), "holds no KV-cache scales")
    one_line_error(verify(fake, directory, "--model", "./gone"), "does not exist")
    other = save_model(tiny_model("gpt_neox"), tmp_path / "other")
    done = verify(fake, directory, "--model", other)
    one_line_error(done, f"'{directory}' is of another model", "llama", "gpt_neox")
    assert fake.requests == []
    done = fp8kv("verify", directory, "--served", "http://127.0.0.1:9")
    one_line_error(done, "Connection refused; is it running?", "such as http://localhost:8000")
    fake.models = [{"id": "a"}, {"id": "b"}]
    one_line_error(verify(fake, directory, "--served-name", "x"), "serves no model 'x'", "'a', 'b'")


@pytest.mark.parametrize(("variable", "echo"), [("FP8KV_API_KEY", False), ("OPENAI_API_KEY", True)])
def test_keys_and_prompts_are_in_no_output(variable, echo, fake, directory, monkeypatch, capfd, caplog):
    monkeypatch.setenv(variable, SECRET)

    def repeat(path, answer):
        said = json.dumps([fake.requests[-1], fake.headers[-1:]]).encode()
        return (500, said) if "completions" in path else answer

    fake.change = repeat if echo else fake.change
    with caplog.at_level(logging.DEBUG):
        done = verify(fake, directory, "--debug")
    assert isinstance(done.exception, InputError) if echo else done.exit_code == 0
    assert {headers["Authorization"] for headers in fake.headers} == {f"Bearer {SECRET}"}
    seen = "".join([done.output, str(done.exception), *capfd.readouterr(), caplog.text])
    prompt = ", ".join(map(str, fake.requests[1][1]["prompt"][:5]))
    assert not {secret for secret in (SECRET, prompt) if secret in seen}


def test_flags_that_mean_nothing(directory):
    one_line_error(fp8kv("verify", directory, "--model", directory), "--model", "without --served")
    flags = ["--served", "http://x", "--engine", "vllm", "--tensor-parallel-size", "1"]
    done = fp8kv("verify", directory, *flags)
    one_line_error(done, "--engine, --tensor-parallel-size means nothing with --served")


def test_the_rule():
    for to_scales, to_ones, apart, noise, rounding, said in (
        (0.2, 4.7, 4.7, 0.0, 0.1, "scales"),
        (7.8, 4.1, 4.7, 0.0, 0.1, "1.0"),  # vLLM at 1.0, which is not ours at 1.0
        (0.19, 0.2, 0.14, 0.0, 0.1, "cannot tell"),
        (0.0, 0.41, 0.41, 0.05, 0.05, "scales"),
        (0.0, 0.39, 0.39, 0.05, 0.05, "cannot tell"),
        (8.0, 5.0, 4.7, 0.0, 0.1, "cannot tell"),  # another model
        (3.0, 1.8, 4.7, 0.0, 0.1, "cannot tell"),  # some of the scales, perhaps
        (0.9, 3.9, 4.0, 0.0, 0.01, "scales"),  # most of them
        (1.2, 4.0, 4.7, 0.0, 0.1, "cannot tell"),
        (0.1, float("nan"), float("nan"), 0.0, 0.1, "cannot tell"),
        (0.2, 4.7, 4.7, 0.0, float("nan"), "cannot tell"),
    ):
        assert decide(to_scales, to_ones, apart, noise, rounding) == said
