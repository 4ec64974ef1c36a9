"""What a server answers: wrong answers, keys that must stay secret, servers that are slow, or are none."""

import socket
import ssl
import threading
import time
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import fp8kv
from fake_server import SECRET, FakeServer, running

from calib.errors import InputError
from calib.evaluate.served.client import Server, _explanation

TEXTS = [[3 + i, *range(4, 11)] for i in range(3)]


@pytest.fixture
def fake():
    """A server without a model, to which all tokens are as likely."""
    return FakeServer()


def ask(fake, name=None):
    with running(fake) as url:
        server = Server(url)
        return server.ask(server.choose_model(name).id, TEXTS)


def refuses(target, *phrases, name=None):
    """One line, of a fake that is asked for logprobs, or of a URL that is asked for its models."""
    with pytest.raises(InputError) as found:
        Server(target).choose_model(name) if isinstance(target, str) else ask(target, name)
    for phrase in phrases:
        assert phrase in str(found.value)
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


def test_nodes_that_store_with_other_scales_are_told_apart(fake, tmp_path):
    other = FakeServer()
    good = {"in_use": 4, "total": 4, "problems": [], "fingerprint": "ab" * 16}
    with running(fake) as prefill, running(other) as decode:
        command = ["verify", tmp_path, "--served", prefill, "--served", decode]
        for theirs, status, said in (
            (good, 0, "each reads the other's KV blocks rightly"),
            (good | {"fingerprint": "cd" * 16}, 1, "KV blocks of one are wrong in the other"),
            (
                good | {"in_use": 3, "problems": ["rank 1: K is bad"]},
                1,
                f"problem: {decode}: rank 1: K is bad",
            ),
            (None, 2, f"{decode}/v1/ does not say which scales it uses; serve with vLLM 0.32 or newer"),
        ):
            fake.in_force, other.in_force = good, theirs
            done = fp8kv(*command)
            assert (done.exit_code, said in done.stdout + done.stderr) == (status, True), done.output
    assert [path for path, _ in fake.requests] == ["/v1/fp8kv/scales"] * 4


def no_logprobs(path, answer):
    return {"choices": [{"text": ""}]} if "completions" in path else answer


def other_tokens(path, answer):
    for row in answer.get("choices", [{}])[0].get("prompt_logprobs", [])[5:]:
        row["999"] = row.pop(next(iter(row)))
    return answer


def counting(count):
    return lambda path, answer: answer | {"usage": {"prompt_tokens": count}}


def sending(content, status=200, where="/v1"):
    return lambda path, answer: (status, content) if where in path else answer


STRANGE = "answers something else than expected; give the address of an OpenAI-compatible server"


def test_wrong_answers_are_one_line(fake):
    for fake.change, phrases in (
        (no_logprobs, ["gives no logprobs, of prompts or of generated tokens", "fp8kv stress"]),
        (counting(131), ["read 131 tokens where 8 were sent", "another tokeniser", "--model"]),
        (other_tokens, ["read 5 tokens where 8 were sent"]),
        (counting("8"), [STRANGE]),
        (lambda *_: {"data": [{"id": "m", "max_model_len": -1}]}, [STRANGE]),
        (sending(b"<html>hello"), [f"v1/models {STRANGE}"]),
        (sending(b"[" * 100_000), [STRANGE]),
        (sending(b"", 404), ["HTTP 404; see the server's log", "such as http://localhost:8000"]),
        (sending(b"", 401), ["HTTP 401; give its key in FP8KV_API_KEY"]),
        (sending(b"", 400, "completions"), ["HTTP 400 to token ids as a prompt, with logprobs"]),
        (sending(b"", 422, "completions"), ["HTTP 422 to token ids as a prompt"]),
        (sending(b"", 400), ["v1/models answers HTTP 400; see the server's log"]),
        (lambda *_: {"data": []}, ["serves no model; load one there", "http://localhost:8000"]),
    ):
        refuses(fake, *phrases)


@pytest.mark.parametrize("prompt_logprobs", ["given", "ignored"])
def test_logprobs_are_numbers_up_to_0_or_a_rounding_above(prompt_logprobs, fake):
    def saying(logprob, path, answer):
        for choice in answer.get("choices", []):
            choice["logprobs"]["token_logprobs"] = [logprob]
            for row in choice.get("prompt_logprobs", [])[1:]:
                row |= {token: {"logprob": logprob} for token in row}
        return answer

    fake.prompt_logprobs = prompt_logprobs
    for logprob in (float("nan"), True, "-1.5", 0.5):
        fake.change = partial(saying, logprob)
        refuses(fake, STRANGE)
    fake.change = partial(saying, 0.001)
    assert {*chain(*ask(fake).first)} == {0.001}


def test_an_answer_of_more_than_64_mib_is_cut_off(fake, monkeypatch):
    monkeypatch.setattr("calib.evaluate.served.client._MAX_BYTES", 1000)
    fake.change = sending(b" " * 300_000 + b"{}", where="completions")
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
    fake.change = sending(b"", number)
    assert SECRET not in refuses(fake, f"HTTP {number}; it refuses the key in {variable}")


def test_a_key_of_openai_goes_nowhere_in_the_clear_and_ours_comes_first(monkeypatch):
    def keys(*urls):
        return [Server(url)._headers.get("Authorization") for url in urls]

    private = ("https://somewhere.else", "http://[::1]:8000", "http://LOCALHOST")
    monkeypatch.setenv("OPENAI_API_KEY", "openai's")
    assert keys(*private, "http://somewhere.else") == ["Bearer openai's"] * 3 + [None]
    monkeypatch.setenv("FP8KV_API_KEY", "ours")
    assert keys(*private, "http://somewhere.else") == ["Bearer ours"] * 4
    for extra in ("\nHost: x", "é"):
        monkeypatch.setenv("FP8KV_API_KEY", f"{SECRET}{extra}")
        assert SECRET not in refuses("http://x", "FP8KV_API_KEY holds characters that no key has")


def test_two_texts_are_enough_for_a_slow_server(fake, monkeypatch):
    late = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * len(late))
    monkeypatch.setattr("calib.evaluate.served.client.time", clock)
    # the first request is for the models, the second a trial; each text is asked for twice
    fake.wait = lambda number: late.append(number) if number == 6 else None
    refuses(fake, "/v1/completions took more than the 120 s that there are for all requests; try again")
    # a third text that was asked for once does not count
    fake.requests.clear()
    fake.wait = lambda number: late.append(number) if number == 8 else None
    answers = ask(fake)
    assert (answers.prompts, *map(len, (answers.first, answers.again))) == (TEXTS[:2], 2, 2)


def test_a_server_that_never_ends_an_answer_and_a_name_that_is_looked_up_for_long(fake, monkeypatch):
    monkeypatch.setattr("calib.evaluate.served.client.MAX_SECONDS", 0.8)
    fake.drip = 0.2  # less than any wait for one byte
    start = time.monotonic()
    refuses(fake, "took more than the 0.8 s that there are for all requests")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: time.sleep(4))
    before = {*threading.enumerate()}
    refuses("http://slow.example", "took more than the 0.8 s")
    assert time.monotonic() - start < 8
    # Python waits for all other threads when it ends
    assert all(thread.daemon for thread in {*threading.enumerate()} - before)


def test_no_server_there():
    for url, phrase in (
        ("http://no.such.host.invalid", "no answer from http://no.such.host.invalid/v1/models"),
        ("http://127.0.0.1:70000", "--served is not a URL"),
        ("ftp://host", "--served takes http or https"),
        ("http://", "http or https"),
        (f"http://me:{SECRET}@host", "FP8KV_API_KEY"),
        (f"http://host/v1?key={SECRET}", "FP8KV_API_KEY"),
        ("http://ho st", "is it running?"),
        (f"http://{'a' * 64}.example", "no host has this name; is it running?"),
        ("http://127.0.0.1:9/ü", "Connection refused; is it running?"),
    ):
        assert SECRET not in refuses(url, phrase, "such as http://localhost:8000")


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_in_v1_and_no_proxy_sees_the_key(ending, fake, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("FP8KV_API_KEY", SECRET)
    with running(fake) as url:
        assert Server(url + ending).choose_model(None).id == "m"
    assert [headers["Authorization"] for headers in fake.headers] == [f"Bearer {SECRET}"]


def test_certificates_are_checked(fake, monkeypatch):
    """That of this server, for localhost, is signed by itself."""
    certificate = Path(__file__).parents[3] / "support" / "self_signed.pem"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with running(fake, context) as url:
        by_number = url.replace("http", "https")
        by_name = by_number.replace("127.0.0.1", "localhost")
        said = refuses(by_name, "self-signed certificate", "; give the host that it names", "SSL_CERT_FILE")
        assert "is it running" not in said
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert Server(by_name).choose_model(None).id == "m"
        refuses(by_number, "certificate is not valid for '127.0.0.1'", "give the host that it names")


def test_something_that_speaks_no_http_is_running(fake):
    def accept(server):
        for answer in (b"SSH-2.0-OpenSSH_9.6\r\n", b""):
            with server.accept()[0] as connection:
                connection.recv(4096 if answer else 1)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=[server], daemon=True).start()
        for _ in range(2):
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            said = refuses(
                url, "it hung up, or gives no answer in HTTP; does it take http or https? see its log"
            )
            assert "is it running" not in said
    with running(fake) as url:
        said = refuses(url.replace("http", "https"), "it gives no answer in TLS; does it take http://?")
    assert "is it running" not in said


def test_causes_that_form_a_circle():
    error, cause = OSError(5, "Input/output error"), ConnectionRefusedError()
    error.__cause__, cause.__context__ = cause, error
    assert _explanation(error).startswith("Connection refused; is it running?")
