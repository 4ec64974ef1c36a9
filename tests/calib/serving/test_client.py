"""`fp8kv verify --served`: servers that are wrong, slow or away, and what must stay secret."""

import json
import logging
import time

import pytest
from command_line import one_line_error
from fake_server import SECRET, facts, verify

from calib.errors import InputError
from calib.serving.client import Server

NAN = float("nan")


def no_logprobs(path, answer):
    return {"choices": [{"text": ""}]} if "completions" in path else answer


def other_count(path, answer):
    return answer | {"usage": {"prompt_tokens": 131}} if "completions" in path else answer


def other_tokens(path, answer):
    for row in answer.get("choices", [{}])[0].get("prompt_logprobs", [])[5:]:
        row["999"] = row.pop(next(iter(row)))
    return answer


def saying(logprob):
    """A server whose logprobs are all `logprob`, of prompts and of generated tokens."""

    def change(path, answer):
        for choice in answer.get("choices", []):
            choice["logprobs"]["token_logprobs"] = [logprob]
            for row in choice.get("prompt_logprobs", [])[1:]:
                row |= {token: {"logprob": logprob} for token in row}
        return answer

    return change


def counting(count):
    return lambda path, answer: answer | {"usage": {"prompt_tokens": count}}


def holding(positions):
    model = {"id": "m", "max_model_len": positions}
    return lambda path, answer: {"data": [model]} if "models" in path else answer


WRONG = {
    "no logprobs": (no_logprobs, "gives no logprobs", "fp8kv stress"),
    "other count": (other_count, "read 131 tokens where 127 were sent", "--model"),
    "other tokens": (other_tokens, "read 5 tokens where 127 were sent", "another tokeniser"),
    "NaN": (saying(NAN), "something else than expected"),
    "boolean": (saying(True), "something else than expected"),
    "string": (saying("-1.5"), "something else than expected"),
    "positive": (saying(0.5), "something else than expected"),
    "counts in words": (counting("127"), "something else than expected"),
    "counts to true": (counting(True), "something else than expected"),
    "length in words": (holding("129"), "something else than expected"),
    "negative length": (holding(-1), "something else than expected"),
    "no JSON": (lambda *_: (200, b"<html>hello"), "v1/models answers something else"),
    "other JSON": (lambda *_: [1, 2], "something else than expected"),
    "deep JSON": (lambda *_: (200, b"[" * 100_000), "something else than expected"),
    "not found": (lambda *_: (404, b""), "HTTP 404", "such as http://localhost:8000"),
    "redirect": (lambda *_: (307, b""), "HTTP 307"),
    "unauthorised": (lambda *_: (401, b""), "HTTP 401", "give its key in FP8KV_API_KEY"),
    "broken": (lambda *_: (500, b""), "HTTP 500"),
    "refuses": (
        lambda path, answer: (400, b"") if "completions" in path else answer,
        "HTTP 400 to token ids as a prompt",
    ),
    "refuses all": (lambda *_: (400, b""), "v1/models answers HTTP 400; see the server's log"),
    "no models": (lambda *_: {"data": []}, "serves no model; load one", "http://localhost:8000"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_one_line(name, fake, directory, monkeypatch):
    monkeypatch.setattr("calib.serving.server_logprobs.load_model", lambda *_: pytest.fail("loaded"))
    change, *phrases = WRONG[name]
    fake.change = change
    one_line_error(verify(fake, directory), *phrases)


@pytest.mark.parametrize("logprob", [NAN, True, "-1.5", 0.5])
def test_logprobs_of_generated_tokens_are_checked_too(logprob, fake, directory):
    fake.prompt_logprobs, fake.change = "ignored", saying(logprob)
    one_line_error(verify(fake, directory), "something else than expected")


def test_a_server_without_models_has_no_names_to_offer(fake, directory):
    fake.models = []
    for flags in ((), ("--served-name", "x")):
        done = verify(fake, directory, *flags)
        one_line_error(done, "serves no model")
        assert "--served-name" not in done.stderr


def test_several_models(fake, directory):
    fake.models = [*fake.models, {"id": "other"}]
    one_line_error(verify(fake, directory), "serves 2 models", "--served-name", "'m', 'other'")
    one_line_error(verify(fake, directory, "--served-name", "x"), "no model 'x'", "'m', 'other'")
    assert verify(fake, directory, "--served-name", "m").exit_code == 0
    fake.models = [*fake.models[:1], {"id": "alias", "root": "/m"}]
    assert verify(fake, directory).exit_code == 0


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("variable", ["FP8KV_API_KEY", "OPENAI_API_KEY"])
def test_a_key_that_is_refused(variable, status, fake, directory, monkeypatch):
    monkeypatch.setenv(variable, SECRET)
    fake.change = lambda *_: (status, b"")
    done = verify(fake, directory)
    one_line_error(done, f"HTTP {status}", f"refuses the key in {variable}")
    assert SECRET not in done.output


def test_a_slow_server(fake, directory, monkeypatch):
    monkeypatch.setattr("calib.serving.client.MAX_SECONDS", 1.5)
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
    monkeypatch.setattr("calib.serving.client.MAX_SECONDS", 1.5)
    fake.drip = 0.3  # less than any wait for one byte
    start = time.monotonic()
    one_line_error(verify(fake, directory), "took more than the 1.5 s")
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("variable", ["FP8KV_API_KEY", "OPENAI_API_KEY"])
@pytest.mark.parametrize("echo", [False, True])
def test_keys_and_prompts_are_in_no_output(variable, echo, fake, directory, monkeypatch, capfd, caplog):
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


@pytest.mark.parametrize(
    ("url", "keys"),
    [
        ("http://somewhere.else", [None, "ours"]),
        ("https://somewhere.else", ["openai's", "ours"]),
        ("http://[::1]:8000", ["openai's", "ours"]),
        ("http://LOCALHOST", ["openai's", "ours"]),
    ],
)
def test_a_key_of_openai_goes_nowhere_in_the_clear(url, keys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "openai's")
    for key in keys:
        said = Server(url)._headers.get("Authorization")
        assert said == (f"Bearer {key}" if key else None)
        monkeypatch.setenv("FP8KV_API_KEY", "ours")


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
