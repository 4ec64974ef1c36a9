"""What a server answers: wrong answers, keys that must stay secret, servers that are slow."""

import time
from itertools import chain
from types import SimpleNamespace

import pytest
from fake_server import SECRET, FakeServer, running

from calib.errors import InputError
from calib.serving.client import Server

TEXTS = [[3 + i, *range(4, 11)] for i in range(3)]


@pytest.fixture
def fake():
    """A server without a model, to which all tokens are as likely."""
    return FakeServer()


def ask(fake, name=None, texts=TEXTS):
    with running(fake) as url:
        server = Server(url)
        return server.ask(server.choose_model(name).id, texts)


def refuses(fake, *phrases, name=None):
    with pytest.raises(InputError) as found:
        ask(fake, name)
    for phrase in phrases:
        assert phrase in str(found.value)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_each_text_is_asked_for_twice_at_most_a_token_more(fake):
    answers = ask(fake)
    (path, nothing), (_, trial), *asked = fake.requests
    assert (path, nothing) == ("/v1/models", None)
    assert [body["prompt"] for _, body in asked] == [ids for ids in TEXTS for _ in range(2)]
    assert all(body == trial | {"prompt": body["prompt"]} for _, body in asked)
    assert {path for path, _ in fake.requests[1:]} == {"/v1/completions"}
    settings = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "prompt_logprobs": 0}
    assert trial == {"model": "m", "prompt": TEXTS[0]} | settings
    assert (answers.prompts, answers.of_prompt, answers.requests) == (TEXTS, True, 8)
    assert [*map(len, answers.first)] == [*map(len, answers.again)] == [7, 7, 7]


@pytest.mark.parametrize("prompt_logprobs", ["ignored", "refused"])
def test_without_logprobs_of_prompts_three_parts_of_each_text_are_asked_for(prompt_logprobs, fake):
    fake.prompt_logprobs = prompt_logprobs
    answers = ask(fake)
    assert answers.prompts == [ids[:n] for ids in TEXTS for n in (2, 4, 8)]
    assert not answers.of_prompt
    assert [*map(len, answers.first)] == [1] * 9
    assert all("prompt_logprobs" not in body for _, body in fake.requests[2:])


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


def status(number, where="/v1"):
    return lambda path, answer: (number, b"") if where in path else answer


STRANGE = "answers something else than expected; give the address of an OpenAI-compatible server"
WRONG = {
    "no logprobs": (no_logprobs, "gives no logprobs, of prompts or of generated tokens", "fp8kv stress"),
    "other count": (other_count, "read 131 tokens where 8 were sent", "another tokeniser", "--model"),
    "other tokens": (other_tokens, "read 5 tokens where 8 were sent"),
    "counts in words": (counting("8"), STRANGE),
    "counts to true": (counting(True), STRANGE),
    "length in words": (holding("129"), STRANGE),
    "negative length": (holding(-1), STRANGE),
    "no JSON": (lambda *_: (200, b"<html>hello"), f"v1/models {STRANGE}"),
    "other JSON": (lambda *_: [1, 2], STRANGE),
    "deep JSON": (lambda *_: (200, b"[" * 100_000), STRANGE),
    "not found": (status(404), "HTTP 404; see the server's log", "such as http://localhost:8000"),
    "redirect": (status(307), "HTTP 307"),
    "unauthorised": (status(401), "HTTP 401; give its key in FP8KV_API_KEY"),
    "refuses prompts": (status(400, "completions"), "HTTP 400 to token ids as a prompt, with logprobs"),
    "refuses fields": (status(422, "completions"), "HTTP 422 to token ids as a prompt"),
    "refuses all": (status(400), "v1/models answers HTTP 400; see the server's log"),
    "no models": (lambda *_: {"data": []}, "serves no model; load one there", "http://localhost:8000"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_one_line(name, fake):
    fake.change, *phrases = WRONG[name]
    refuses(fake, *phrases)


@pytest.mark.parametrize("prompt_logprobs", ["given", "ignored"])
def test_logprobs_are_numbers_up_to_0_or_a_rounding_above(prompt_logprobs, fake):
    fake.prompt_logprobs = prompt_logprobs
    for logprob in (float("nan"), True, "-1.5", 0.5):
        fake.change = saying(logprob)
        refuses(fake, STRANGE)
    fake.change = saying(0.001)
    assert {*chain(*ask(fake).first)} == {0.001}


def test_an_answer_of_more_than_64_mib_is_cut_off(fake, monkeypatch):
    monkeypatch.setattr("calib.serving.client._MAX_BYTES", 1000)
    fake.change = lambda path, answer: (200, b" " * 300_000 + b"{}") if "completions" in path else answer
    refuses(fake, STRANGE)


def test_one_of_several_models_is_chosen_by_name(fake):
    fake.models = [*fake.models, {"id": "other"}]
    refuses(fake, "serves 2 models; give --served-name, one of: 'm', 'other'")
    refuses(fake, "serves no model 'x'; give --served-name, one of: 'm', 'other'", name="x")
    assert ask(fake, "m").requests == 8
    fake.models = [*fake.models[:1], {"id": "alias", "root": "/m"}]
    assert ask(fake).requests == 8
    fake.models = []
    assert "--served-name" not in refuses(fake, "serves no model", name="x")


@pytest.mark.parametrize(("number", "variable"), [(401, "FP8KV_API_KEY"), (403, "OPENAI_API_KEY")])
def test_a_key_that_is_refused(variable, number, fake, monkeypatch):
    monkeypatch.setenv(variable, SECRET)
    fake.change = status(number)
    assert SECRET not in refuses(fake, f"HTTP {number}; it refuses the key in {variable}")


@pytest.mark.parametrize(
    ("url", "keys"),
    [
        ("http://somewhere.else", [None, "ours"]),
        ("https://somewhere.else", ["openai's", "ours"]),
        ("http://[::1]:8000", ["openai's", "ours"]),
        ("http://LOCALHOST", ["openai's", "ours"]),
    ],
)
def test_a_key_of_openai_goes_nowhere_in_the_clear_and_ours_comes_first(url, keys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "openai's")
    for key in keys:
        said = Server(url)._headers.get("Authorization")
        assert said == (f"Bearer {key}" if key else None)
        monkeypatch.setenv("FP8KV_API_KEY", "ours")


def test_a_key_that_is_none(monkeypatch):
    for extra in ("\nHost: x", "é"):
        monkeypatch.setenv("FP8KV_API_KEY", f"{SECRET}{extra}")
        with pytest.raises(InputError, match="FP8KV_API_KEY holds characters that no key has") as found:
            Server("http://localhost")
        assert SECRET not in str(found.value)


def test_two_texts_are_enough_for_a_slow_server(fake, monkeypatch):
    late = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * len(late))
    monkeypatch.setattr("calib.serving.client.time", clock)
    # the first request is for the models, the second a trial; each text is asked for twice
    fake.wait = lambda number: late.append(number) if number == 6 else None
    refuses(fake, "/v1/completions took more than the 120 s that there are for all requests; try again")
    # a third text that was asked for once does not count
    fake.requests.clear()
    fake.wait = lambda number: late.append(number) if number == 8 else None
    answers = ask(fake)
    assert (answers.prompts, *map(len, (answers.first, answers.again))) == (TEXTS[:2], 2, 2)


def test_a_server_that_never_ends_an_answer(fake, monkeypatch):
    monkeypatch.setattr("calib.serving.client.MAX_SECONDS", 0.8)
    fake.drip = 0.2  # less than any wait for one byte
    start = time.monotonic()
    refuses(fake, "took more than the 0.8 s")
    assert time.monotonic() - start < 8
