"""`fp8kv verify --served`: a server with the scales, one at 1.0, and all that can be wrong."""

import json
import logging
import time
from collections import Counter
from pydoc_data.topics import topics

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error
from fake_server import SECRET, FakeServer, running
from families import save_model, tiny_model
from transformers import AutoModelForCausalLM

from calib.any_scales import open_any_scales
from calib.errors import InputError
from calib.generate import unit_scales
from calib.served import compare, decide
from calib.serving.ask import Answers


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, its twin, and both calibrated; the tokenizer knows words of the texts."""
    root = tmp_path_factory.mktemp("served")
    model = tiny_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # logits that depend on what is attended to
                parameter.mul_(6)
    tokenizer = save_model(model, root / "plain") / "tokenizer.json"
    document = json.loads(tokenizer.read_text())
    words = Counter(" ".join(topics.values()).split()).most_common(125)
    document["model"]["vocab"] = {"<pad>": 0, "<s>": 1, "</s>": 2} | {
        word: i for i, (word, _) in enumerate(words, 3)
    }
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


def serving(made, name, scales):
    model = AutoModelForCausalLM.from_pretrained(made / name).eval()
    opened = {
        "scales": open_any_scales(made / f"{name}-fp8kv"),
        "1.0": unit_scales,
        "16 bits": lambda model: None,
    }
    return FakeServer(model, opened[scales](model))


def verify(fake, directory, *flags):
    with running(fake) as url:
        return fp8kv("verify", directory, "--served", url, *flags)


def facts(done):
    assert done.exit_code in (0, 1), done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("prompt_logprobs", ["given", "ignored", "refused"])
@pytest.mark.parametrize("served", ["scales", "1.0"])
def test_a_twin_tells(served, prompt_logprobs, made, directory):
    fake = serving(made, "twin", served)
    fake.prompt_logprobs = prompt_logprobs
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
    assert found["requests"] == len(fake.requests) <= 40


def test_what_is_asked_for(fake, directory):
    verify(fake, directory)
    (path, nothing), *asked = fake.requests
    assert (path, nothing) == ("/v1/models", None)
    assert {path for path, _ in asked} == {"/v1/completions"}
    prompts = [body["prompt"] for _, body in asked][1:]
    assert prompts[::2] == prompts[1::2]
    assert max(map(len, prompts)) == 128  # the server's 129, less the one generated
    assert len({tuple(ids) for ids in prompts}) == 6
    assert {body["model"] for _, body in asked} == {"m"}


def test_a_text_says_which_and_by_how_much(made, fake, directory):
    done = verify(fake, directory)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "the server is nearer to the scales"
    assert "with the scales 0.0000 nats, with 1.0 0." in lines[1]
    assert "logprobs of 686 given tokens; 14 requests" in lines[2]
    assert "16-bit cache" in lines[3]
    done = verify(serving(made, "twin", "1.0"), directory)
    assert done.exit_code == 1
    assert done.stdout.startswith("the server is nearer to 1.0\n")


@pytest.mark.parametrize("served", ["scales", "1.0", "16 bits"])
def test_a_model_that_needs_no_scales_cannot_tell(served, made):
    done = verify(serving(made, "plain", served), made / "plain-fp8kv")
    assert done.exit_code == 1
    assert done.stdout.startswith("cannot tell")
    assert f"fp8kv stress {made / 'plain-fp8kv'} -o twin" in done.stdout


def test_weights_may_lie_beside_the_scales(fake, made, tmp_path):
    assert calibrate(made / "twin", "-o", tmp_path / "out", "--format", "fp8kv").exit_code == 0
    found = facts(verify(fake, tmp_path / "out", "--model", made / "twin", "--json"))
    assert found["nearer"] == "scales"


def test_a_server_whose_answers_vary_tells_nothing(fake, directory):
    fake.noise = 0.2
    found = facts(verify(fake, directory, "--json"))
    assert found["nearer"] == "cannot tell"
    assert 0.1 < found["noise"] < 0.4


def test_another_model_tells_nothing_or_1_0(fake, directory):
    fake.model, fake.scales = tiny_model("gpt_neox"), None
    assert facts(verify(fake, directory, "--json"))["nearer"] != "scales"


NAN = float("nan")


@pytest.mark.parametrize(
    ("to_scales", "to_ones", "apart", "noise", "rounding", "said"),
    [
        (0.2, 4.7, 4.7, 0.0, 0.1, "scales"),
        (4.7, 0.4, 4.7, 0.0, 0.1, "1.0"),
        (7.8, 4.1, 4.7, 0.0, 0.1, "1.0"),  # vLLM at 1.0, which is not ours at 1.0
        (0.19, 0.2, 0.14, 0.0, 0.1, "cannot tell"),
        (0.0, 0.14, 0.14, 0.0, 0.1, "cannot tell"),
        (0.0, 0.41, 0.41, 0.05, 0.05, "scales"),
        (0.0, 0.39, 0.39, 0.05, 0.05, "cannot tell"),
        (8.0, 8.5, 4.7, 0.0, 0.1, "cannot tell"),  # another model
        (1.2, 4.0, 4.7, 0.0, 0.1, "cannot tell"),
        (0.0, 0.0, 0.0, 0.0, 0.0, "cannot tell"),
        (0.1, NAN, NAN, 0.0, 0.1, "cannot tell"),
        (NAN, NAN, 4.7, NAN, 0.1, "cannot tell"),
        (0.2, 4.7, 4.7, 0.0, NAN, "cannot tell"),
    ],
)
def test_the_rule(to_scales, to_ones, apart, noise, rounding, said):
    assert decide(to_scales, to_ones, apart, noise, rounding) == said


def test_what_is_no_number_is_null_in_json():
    answers = Answers([[1, 2]], True, [[-1.0]], [[-1.5]], 4, 0.5)
    found = compare(answers, *(torch.tensor([x]) for x in (-1.0, NAN, -1.25))).to_json()
    nats = {"to_scales": 0.0, "to_ones": None, "apart": None, "noise": 0.5, "rounding": 0.25}
    rest = {"logprobs": 1, "of_prompt": True, "requests": 4, "seconds": 0.5}
    assert found == {"nearer": "cannot tell", **nats, **rest}


def no_logprobs(path, answer):
    return {"choices": [{"text": ""}]} if "completions" in path else answer


def other_count(path, answer):
    return answer | {"usage": {"prompt_tokens": 131}} if "completions" in path else answer


def other_tokens(path, answer):
    for row in answer.get("choices", [{}])[0].get("prompt_logprobs", [])[5:]:
        row["999"] = row.pop(next(iter(row)))
    return answer


def not_a_number(path, answer):
    for row in answer.get("choices", [{}])[0].get("prompt_logprobs", [])[1:]:
        row |= {i: {"logprob": NAN} for i in row}
    return answer


WRONG = {
    "no logprobs": (no_logprobs, "gives no logprobs", "fp8kv stress"),
    "other count": (other_count, "read 131 tokens where 127 were sent", "--model"),
    "other tokens": (other_tokens, "read 5 tokens where 127 were sent", "another tokeniser"),
    "NaN": (not_a_number, "something else than expected"),
    "no JSON": (lambda *_: (200, b"<html>hello"), "v1/models answers something else"),
    "other JSON": (lambda *_: [1, 2], "something else than expected"),
    "deep JSON": (lambda *_: (200, b"[" * 100_000), "something else than expected"),
    "not found": (lambda *_: (404, b""), "HTTP 404", "such as http://localhost:8000"),
    "redirect": (lambda *_: (307, b""), "HTTP 307"),
    "unauthorised": (lambda *_: (401, b""), "HTTP 401", "FP8KV_API_KEY or OPENAI_API_KEY"),
    "broken": (lambda *_: (500, b""), "HTTP 500"),
    "refuses": (
        lambda path, answer: (400, b"") if "completions" in path else answer,
        "HTTP 400 to token ids as a prompt",
    ),
    "no models": (lambda *_: {"data": []}, "serves 0 models"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_one_line(name, fake, directory, monkeypatch):
    monkeypatch.setattr("calib.served.load_model", lambda *_: pytest.fail("loaded"))
    change, *phrases = WRONG[name]
    fake.change = change
    one_line_error(verify(fake, directory), *phrases)


def test_several_models(fake, directory):
    fake.models = [*fake.models, {"id": "other"}]
    one_line_error(verify(fake, directory), "serves 2 models", "--served-name", "'m', 'other'")
    one_line_error(verify(fake, directory, "--served-name", "x"), "no model 'x'", "'m', 'other'")
    assert verify(fake, directory, "--served-name", "m").exit_code == 0
    fake.models = [*fake.models[:1], {"id": "alias", "root": "/m"}]
    assert verify(fake, directory).exit_code == 0


@pytest.mark.parametrize(
    ("url", "phrase"),
    [
        ("http://127.0.0.1:9", "Connection refused; is it running?"),
        ("http://no.such.host.invalid", "no answer from http://no.such.host.invalid/v1/models"),
        ("http://127.0.0.1:70000", "is no URL"),
        ("127.0.0.1:8000", "http or https"),
        ("ftp://host", "http or https"),
        ("http://", "http or https"),
        (f"http://me:{SECRET}@host", "FP8KV_API_KEY"),
        (f"http://host/v1?key={SECRET}", "FP8KV_API_KEY"),
        ("http://ho st", "no answer"),
    ],
)
def test_no_server_there(url, phrase, directory):
    done = fp8kv("verify", directory, "--served", url)
    one_line_error(done, phrase, "such as http://localhost:8000")
    assert SECRET not in done.output


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_addresses(ending, fake, directory):
    with running(fake) as url:
        assert fp8kv("verify", directory, "--served", url + ending).exit_code == 0


def test_a_slow_server(fake, directory, monkeypatch):
    monkeypatch.setattr("calib.serving.ask.MAX_SECONDS", 1.5)
    fake.wait = lambda number: time.sleep(3 if number > 2 else 0)
    start = time.monotonic()
    one_line_error(verify(fake, directory), "took more than the 1.5 s", "try again")
    assert time.monotonic() - start < 10
    # two texts are enough, and a third that was asked for once does not count
    fake.wait = lambda number: time.sleep(3 if number > 7 + fake.before else 0)
    fake.before = len(fake.requests)
    found = facts(verify(fake, directory, "--json"))
    assert (found["nearer"], found["logprobs"]) == ("scales", 253)


def test_a_server_that_never_ends_an_answer(fake, directory, monkeypatch):
    monkeypatch.setattr("calib.serving.ask.MAX_SECONDS", 1.5)
    fake.drip = 0.3  # less than any wait for one byte
    start = time.monotonic()
    one_line_error(verify(fake, directory), "took more than the 1.5 s")
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("variable", ["FP8KV_API_KEY", "OPENAI_API_KEY"])
@pytest.mark.parametrize("echo", [False, True])
def test_keys_and_prompts_are_in_no_output(
    variable, echo, fake, directory, monkeypatch, capfd, caplog
):
    monkeypatch.setenv(variable, SECRET)
    asked = [("words of the prompt", json.dumps([1, 2]))]

    def repeat(path, answer):
        said = json.dumps([fake.requests[-1], fake.headers[-1:], asked]).encode()
        return (500, said) if "completions" in path else answer

    fake.change = repeat if echo else fake.change
    with caplog.at_level(logging.DEBUG):
        done = verify(fake, directory, "--debug")
    assert isinstance(done.exception, InputError) if echo else done.exit_code == 0
    assert {headers["Authorization"] for headers in fake.headers} == {f"Bearer {SECRET}"}
    seen = "".join([done.output, str(done.exception), *capfd.readouterr(), caplog.text])
    prompt = fake.requests[1][1]["prompt"]
    for secret in (SECRET, "words of the prompt", ", ".join(map(str, prompt[:5]))):
        assert secret not in seen


def test_our_key_comes_first(fake, directory, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    monkeypatch.setenv("FP8KV_API_KEY", SECRET)
    verify(fake, directory)
    assert {headers["Authorization"] for headers in fake.headers} == {f"Bearer {SECRET}"}


def test_a_key_that_is_none(fake, directory, monkeypatch):
    monkeypatch.setenv("FP8KV_API_KEY", f"{SECRET}\nHost: x")
    done = verify(fake, directory)
    one_line_error(done, "FP8KV_API_KEY holds characters that no key has")
    assert SECRET not in done.output


def test_flags_that_mean_nothing(directory):
    one_line_error(fp8kv("verify", directory, "--model", directory), "--model", "without --served")
    flags = ["--served", "http://x", "--engine", "vllm", "--tensor-parallel-size", "1"]
    done = fp8kv("verify", directory, *flags)
    one_line_error(done, "--engine, --tensor-parallel-size means nothing with --served")


def test_what_is_wrong_here_is_said_before_a_server_is_asked(fake, made):
    one_line_error(verify(fake, made / "twin"), "holds no KV-cache scales")
    one_line_error(verify(fake, made / "twin-fp8kv", "--model", "./gone"), "does not exist")
    assert fake.requests == []
