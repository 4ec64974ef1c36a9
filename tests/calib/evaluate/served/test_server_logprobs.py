"""`fp8kv verify --served`: servers with scales and at 1.0; wrong answers, secret keys, slow servers, none."""

import json
import logging
import re
import shutil
import socket
import ssl
import threading
import time
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import apply_cases
import pytest
from command_line import SMALL, calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from fake_server import SECRET, FakeServer, facts, running, serving, verify
from families import save_model, tiny_model

from calib.errors import Fp8kvError, InputError
from calib.evaluate.served.client import Server, _explanation, is_reduced
from calib.evaluate.served.logprobs import ServerComparison, decide
from calib.files.stored_scales import read_scales


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, its twin, and both calibrated; the tokenizer knows words of the texts."""
    root = tmp_path_factory.mktemp("served")
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.dim() == 2 else 1  # logits that depend on what is attended to
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
def twin(made):
    return serving(made, "twin", "scales")


@pytest.fixture
def directory(made):
    return made / "twin-fp8kv"


def given_tokens(server):
    """Tokens that have one before them, in the prompts that the server was asked for."""
    return sum(len(ids) - 1 for ids in {tuple(body["prompt"]) for _, body in server.requests[2:-1]})


@pytest.mark.parametrize(
    ("served", "prompt_logprobs"), [("scales", "given"), ("1.0", "ignored"), ("scales", "refused")]
)
def test_a_twin_tells(served, prompt_logprobs, made, directory):
    twin, start = serving(made, "twin", served), time.monotonic()
    twin.prompt_logprobs = prompt_logprobs
    twin.wait = lambda number: time.sleep(0.01)
    done = verify(twin, directory, "--json")
    found = facts(done)
    assert found["nearer"] == served
    assert done.exit_code == (served == "1.0")
    near, far = ("to_scales", "to_ones") if served == "scales" else ("to_ones", "to_scales")
    assert found[near] < 1e-5  # the very same computation
    assert found[far] == pytest.approx(found["apart"], rel=1e-3)
    assert found["noise"] == 0
    assert 0 < found["rounding"] < found["apart"] / 4
    assert found["of_prompt"] == (prompt_logprobs == "given")
    assert found["logprobs"] == (given_tokens(twin) if found["of_prompt"] else 6 * 3)
    assert found["requests"] == len(twin.requests) - 1 <= 40  # and one to our plugin
    assert found["seconds"] > 0.01 * found["requests"]
    told = verify(twin, directory, "--progress", "json").stderr.splitlines()
    stages = [(x["stage"], x["total"]) for x in map(json.loads, told) if x["event"] == "end"]
    assert stages == [("ask the server", None), ("run the model", 3 * (6 if found["of_prompt"] else 18))]
    assert 0 < found["own_seconds"] < time.monotonic() - start - found["seconds"]


def test_a_text_says_which_and_by_how_much(made, twin, directory):
    lines = succeeded(verify(twin, directory)).stdout.splitlines()
    assert lines[0] == "the server is nearer to the scales"
    far, apart = re.search(r"by 0.0000 nats .*, by (.+) from it at 1.0 \((.+) between", lines[1]).groups()
    assert float(far) == pytest.approx(float(apart), rel=1e-3, abs=1e-4) != 0
    assert f"logprobs of {given_tokens(twin)} given tokens; 14 requests in" in lines[2]
    assert re.search(r" in \d+\.\d s, our own runs in \d+\.\d s\)$", lines[2])
    assert "most of the scales, or a 16-bit cache" in lines[3]
    assert lines[4:] == [f"note: it says that it serves '/m', and not '{directory}'"]
    prompts = [body["prompt"] for _, body in twin.requests[2:-1]]
    assert max(map(len, prompts)) == 128  # the server's 129, less the one generated
    assert len({tuple(ids) for ids in prompts}) == 6
    other = serving(made, "twin", "1.0")
    other.models[0]["root"] = str(directory)
    done = verify(other, directory)
    assert (done.exit_code, "it serves" in done.stdout) == (1, False)
    assert done.stdout.startswith("the server is nearer to 1.0\n")


def test_a_server_with_the_largest_of_the_heads_is_said_to_have_that(made, twin, directory, tmp_path):
    assert calibrate(made / "twin", "-o", tmp_path / "heads", "--strategy", "attn_head").exit_code == 0
    compared = (
        f"one scale of several heads was compared with the largest of the heads in '{tmp_path / 'heads'}'"
    )
    for served, says in (directory, True), (tmp_path / "heads", False):
        twin.in_force = in_force(served)
        lines = succeeded(verify(twin, tmp_path / "heads")).stdout.splitlines()
        assert any(line.endswith(f"{compared}, in layers 0, 1, 2") for line in lines) == says
    heads = (0.5, 0.75, 0.5, 0.75)
    assert [is_reduced(heads, count) for count in (0, 1, 2, 4)] == [False, True, True, False]
    assert not is_reduced((0.5, 0.5, 0.75, 0.75), 2)


def test_a_server_says_whether_its_cache_is_not_watched_or_has_read_nothing(fake, directory, monkeypatch):
    for status, said in (404, "does not watch its cache; serve with"), (425, "has counted nothing: it"):
        monkeypatch.setattr(fake, "answer", lambda path, body, status=status: (status, b""))
        with running(fake) as url:
            one_line_error(fp8kv("watch", f"{url}/v1"), f"fp8kv: {url} {said}")
    # still 425, of another path
    one_line_error(verify(fake, directory), "/v1/models answers HTTP 425; see the server's log")


def test_weights_may_lie_beside_the_scales(twin, made, tmp_path):
    assert calibrate(made / "twin", "-o", tmp_path / "out", "--format", "fp8kv").exit_code == 0
    # of a server that was started on a model without scales
    said = "rank 0: K has no scale in {} and is at 1.0 in layers 0, 1, 2"
    twin.in_force = in_force(made / "plain-fp8kv") | {"problems": [said.format("the files")]}
    # no engine loads format fp8kv, so its scales are not compared with those that a plugin names
    directory, own = made / "twin-fp8kv", [said.format("the server's files")]
    differs = f"it does not use the scales of '{directory}' in layers 0, 1, 2; if it was started on another"
    for scales, problems in (
        (tmp_path / "out", own),
        (directory, [*own, f"{differs} directory, give that"]),
    ):
        done = verify(twin, scales, "--model", made / "twin", "--json")
        found = facts(done)
        assert (found["nearer"], found["plugin"]["problems"], done.exit_code) == ("scales", problems, 1)
        plugin = found["plugin"]
        assert (plugin["in_use"], "layers" in plugin) == (6, False)


def test_problems_of_the_calibration_itself_are_told_as_without_a_server(made, twin, directory, tmp_path):
    half = apply_cases.damage(directory, tmp_path / "half", {"model.layers.1.self_attn.k_scale": 0.5})
    mixed = shutil.copytree(made / "plain-fp8kv", tmp_path / "mixed")  # beside the twin's weights
    weights = next(mixed.glob("model-0*.safetensors"))
    weights.unlink()
    shutil.copy(next(directory.glob("model-0*.safetensors")), weights)
    model, own = ("--model", made / "twin"), tmp_path / "own"
    ran("calibrate", made / "plain", "-o", own, "--format", "fp8kv", *SMALL)
    for scales, flags, problem in (
        (half, (), f"'{half}': scales were changed (k_scale of layer 1)"),
        (mixed, (), f"the scales of '{mixed}' do not fit the weights beside them: a row of"),
        (own, model, f"the scales of '{own}' do not fit '{made / 'twin'}': a row of"),
    ):
        done = verify(twin, scales, *flags)
        assert (done.exit_code, done.stdout.count(f"problem: {problem}")) == (1, 1), done.output
    assert facts(verify(twin, half, "--json"))["problems"][0].startswith(f"'{half}': scales were changed")
    second = FakeServer()
    with running(twin) as one, running(second) as other:
        for scales, problem in (half, "scales were changed"), (mixed, "do not fit the weights beside them"):
            twin.in_force = second.in_force = in_force(scales)
            done = fp8kv("verify", scales, "--served", one, "--served", other)
            assert (done.exit_code, "each reads the other's KV" in done.stdout) == (1, True), done.output
            (said,) = re.findall(f"^problem: (.*{problem}.*)", done.stdout, re.MULTILINE)
            told = json_of("verify", scales, "--served", one, "--served", other, status=1)
            assert (told["same"], told["problems"]) == (True, [said])


def test_an_answer_of_a_plugin_that_lacks_a_part_is_refused(twin, directory):
    for part in ("fnuz", "layers", "problems"):
        twin.in_force = {x: value for x, value in in_force(directory).items() if x != part}
        one_line_error(
            verify(twin, directory),
            f"v1/fp8kv/scales {VERSION}",
        )
    twin.in_force = {"detail": "nothing here"}  # a server without the plugin that answers every path
    assert facts(verify(twin, directory, "--json"))["plugin"] is None
    twin.in_force = {x: value for x, value in in_force(directory).items() if x != "layers"}
    newer = FakeServer()
    newer.in_force = in_force(directory)
    with running(twin) as url, running(newer) as second:
        done = fp8kv("verify", directory, "--served", url, "--served", second)
    one_line_error(done, f"{url}/v1/fp8kv/scales {VERSION}")


def test_answers_that_vary_or_of_a_model_that_needs_no_scales_or_of_another_tell_nothing(
    made, twin, directory
):
    plain = serving(made, "plain", "16 bits")
    done = verify(plain, made / "plain-fp8kv")
    assert done.exit_code == 1
    assert done.stdout.startswith("cannot tell")
    assert f"fp8kv stress {made / 'plain-fp8kv'} -o twin" in done.stdout
    good, uses = in_force(made / "plain-fp8kv"), "the server uses the scales, says its plugin"
    for said, first, status in (
        (good, f"{uses}; logprobs cannot tell: scales move ours by no more than 4 times noise and", 0),
        (good | {"in_use": 5}, "cannot tell", 1),
        (in_force(directory), "what the server's plugin says does not fit", 1),
    ):
        plain.in_force = said
        done = verify(plain, made / "plain-fp8kv")
        assert (done.exit_code, done.stdout.startswith(first)) == (status, True)
        assert ("-o twin" in done.stdout) == (first == "cannot tell")
    plain.in_force, plain.noise = good, 2.0
    assert verify(plain, made / "plain-fp8kv").exit_code == 1
    twin.noise = 2.0
    found = facts(verify(twin, directory, "--json"))
    assert found["nearer"] == "cannot tell"
    assert 1 < found["noise"] < 4


def test_a_baked_model_is_at_1_by_the_word_of_the_plugin(made, twin, tmp_path):
    baked = tmp_path / "baked"
    succeeded(fp8kv("bake", made / "twin", "--scales", made / "twin-fp8kv", "--for", "fp8", "-o", baked))
    ones = [{"layer": i, "cache": "fp8", "k": [1.0], "v": [1.0]} for i in range(3)]
    good = in_force(made / "twin-fp8kv") | {"layers": ones}
    wrong = good | {"layers": [ones[0] | {"k": [0.5]}, *ones[1:]]}
    right = "stores at 1.0, which is right for a baked model"
    for said, first, status in (
        (good, f"the server {right}, says its plugin", 0),
        (wrong, "what the server's plugin says does not fit", 1),
        (None, f"cannot tell whether the server {right}", 1),
    ):
        twin.in_force = said
        done = verify(twin, baked)
        assert (done.exit_code, done.stdout.startswith(first)) == (status, True)
        assert "-o twin" not in done.stdout


def test_what_is_wrong_is_said_before_a_server_is_asked_or_weights_are_read(
    made, twin, directory, tmp_path, monkeypatch
):
    monkeypatch.setattr("calib.evaluate.served.logprobs.load_model", lambda *_: pytest.fail("loaded"))
    one_line_error(verify(twin, made / "twin"), "holds no KV-cache scales")
    one_line_error(verify(twin, directory, "--model", "./gone"), "does not exist")
    done = verify(twin, directory, "--model", save_model(tiny_model("gpt_neox"), tmp_path / "other"))
    one_line_error(done, f"'{directory}' is of another model", "llama", "gpt_neox")
    assert twin.requests == []
    done = fp8kv("verify", directory, "--served", "http://127.0.0.1:9")
    one_line_error(done, "Connection refused; is it running?", "such as http://localhost:8000")
    twin.models = [{"id": "a"}, {"id": "b"}]
    one_line_error(verify(twin, directory, "--served-name", "x"), "serves no model 'x'", "'a', 'b'")


@pytest.mark.parametrize(("variable", "echo"), [("FP8KV_API_KEY", False), ("OPENAI_API_KEY", True)])
def test_keys_and_prompts_are_in_no_output(variable, echo, twin, directory, monkeypatch, capfd, caplog):
    monkeypatch.setenv(variable, SECRET)

    def repeat(path, answer):
        said = json.dumps([twin.requests[-1], twin.headers[-1:]]).encode()
        return (500, said) if "completions" in path else answer

    twin.change = repeat if echo else twin.change
    with caplog.at_level(logging.DEBUG):
        done = verify(twin, directory, "--debug")
    assert isinstance(done.exception, InputError) if echo else done.exit_code == 0
    assert {headers["Authorization"] for headers in twin.headers} == {f"Bearer {SECRET}"}
    seen = "".join([done.output, str(done.exception), *capfd.readouterr(), caplog.text])
    prompt = ", ".join(map(str, twin.requests[1][1]["prompt"][:5]))
    assert not {secret for secret in (SECRET, prompt) if secret in seen}


def test_flags_that_mean_nothing(directory):
    one_line_error(fp8kv("verify", directory, "--model", directory), "--model", "without --served")
    for name in ("--tensor-parallel-size", "--tp-size", "--tp", "-tp"):  # engines' words
        done = fp8kv("verify", directory, "--served", "http://x", "--engine", "vllm", name, "1")
        one_line_error(done, "--engine, --tensor-parallel-size means nothing with --served")
    two = ("--served", "http://x", "--served", "http://y")
    done = fp8kv("verify", directory, *two, "--model", directory, "--device", "cpu", "--engine", "vllm")
    one_line_error(done, "--device, --engine, --model means nothing with more than one --served URL")


def test_the_rule():
    for to_scales, to_ones, apart, noise, rounding, said in (
        (0.2, 4.7, 4.7, 0.0, 0.1, "scales"),
        (7.8, 4.1, 4.7, 0.0, 0.1, "1.0"),  # vLLM at 1.0, which is not ours at 1.0
        (0.19, 0.2, 0.14, 0.0, 0.1, "cannot tell"),
        (0.0, 0.41, 0.41, 0.05, 0.05, "scales"),
        (0.0, 0.39, 0.39, 0.05, 0.05, "cannot tell"),
        (8.0, 5.0, 4.7, 0.0, 0.1, "neither"),  # another model
        (8.0, 8.0, 0.003, 0.0, 0.001, "neither"),
        (0.19, 0.2, 0.01, 0.0, 0.01, "cannot tell"),  # weights of 4 bits, perhaps
        (0.6, 0.6, 0.01, 0.1, 0.1, "cannot tell"),
        (3.0, 1.8, 4.7, 0.0, 0.1, "cannot tell"),  # some of the scales, perhaps
        (0.9, 3.9, 4.0, 0.0, 0.01, "scales"),  # most of them
        (1.2, 4.0, 4.7, 0.0, 0.1, "cannot tell"),
        (0.1, float("nan"), float("nan"), 0.0, 0.1, "cannot tell"),
        (0.2, 4.7, 4.7, 0.0, float("nan"), "cannot tell"),
        (8.0, float("nan"), 0.1, 0.0, 0.01, "cannot tell"),
        (float("nan"), 8.0, 0.1, 0.0, 0.01, "cannot tell"),
    ):
        assert decide(to_scales, to_ones, apart, noise, rounding) == said
    # the plugin's word counts only where logprobs are the same with the scales and without
    nats = {"to_scales": 0.4, "to_ones": 0.4, "noise": 0.01, "rounding": 0.0}
    others = {"logprobs": 9, "of_prompt": True, "requests": 2, "seconds": 1.0, "own_seconds": 1.0}
    for apart, is_like_both in ((0.04, True), (0.5, False)):
        comparison = ServerComparison("cannot tell", "m", None, apart=apart, **nats, **others, is_baked=False)
        assert comparison.is_like_both == is_like_both


def test_another_model_is_named_and_no_twin_is_advised(made, directory):
    other = tiny_model("gpt_neox")
    for parameter in other.parameters():
        parameter.data *= 20 if parameter.dim() == 2 else 1  # as sure of its tokens as a trained one
    fake = FakeServer(other)
    unlike = f"the server says that it serves 'm' from '{directory}', and answers unlike '{directory}'"
    for root, first, last in (
        (
            "/m",
            f"the server serves another model: 'm' from '/m', and not '{directory}'",
            "give the directory and",
        ),
        (str(directory), unlike, "if its files were changed after the server started, start it again"),
    ):
        fake.models[0]["root"], fake.in_force = root, None
        done = verify(fake, directory)
        lines = done.stdout.splitlines()
        assert (done.exit_code, len(lines), lines[0]) == (1, 4, first)
        assert lines[3].startswith(last)
        # what differs may be the scales alone
        fake.in_force = in_force(directory) | {
            "layers": [{"layer": 0, "cache": "fp8", "k": [9.0], "v": [9.0]}]
        }
        done = verify(fake, directory)
        assert (done.exit_code, "does not use the scales of" in done.stdout) == (1, True)
        assert done.stdout.startswith(first)


TEXTS = [[3 + i, *range(4, 11)] for i in range(3)]


@pytest.fixture
def fake():
    """A server without a model, to which all tokens are as likely."""
    return FakeServer()


def ask(fake, name=None):
    with running(fake) as url:
        server = Server(url)
        return server.ask(server.choose_model(name).id, TEXTS, "MODEL")


def refuses(target, *phrases, name=None):
    """One line, of a fake that is asked for logprobs, or of a URL that is asked for its models."""
    with pytest.raises(Fp8kvError) as found:
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


def in_force(directory):
    """What our plugin says of an engine that stores with the scales in `directory`."""
    layers = [
        {"layer": layer.layer, "cache": "fp8", "k": [*layer.values("k")], "v": [*layer.values("v")]}
        for layer in read_scales(directory).layers
    ]
    counts = dict.fromkeys(("in_use", "total"), 2 * len(layers))
    return counts | {"problems": [], "fingerprint": "ab" * 16, "fnuz": False, "layers": layers}


def test_nodes_that_store_with_other_scales_are_told_apart(fake, made, directory):
    other, good = FakeServer(), in_force(directory)
    first, *rest = good["layers"]
    nan = {"layers": [first | {"v": [None]}, *rest]}
    unused = f"it does not use the scales of '{directory}' in layer 0; if it was started on another"
    both = "the servers store with the same scales: each reads the other's KV blocks rightly"
    with running(fake) as prefill, running(other) as decode:
        for own, theirs, status, said in (
            (good, good, 0, f"store with the scales of '{directory}': each reads the other's KV"),
            (good, good | {"fingerprint": "cd" * 16}, 1, "KV blocks of one are wrong in the other"),
            (good, good | {"problems": ["rank 1: K is bad"]}, 1, f"problem: {decode}: rank 1: K is bad"),
            (good, good | nan, 1, f"problem: {decode}: {unused}"),
            (in_force(made / "plain-fp8kv"), in_force(made / "plain-fp8kv"), 1, both),
            (good | {"layers": rest}, good, 1, f"problem: {prefill}: {unused}"),
            (good | {"server": "7"}, good | {"server": "7"}, 2, f"{prefill} and {decode} are one server"),
            (good | {"server": "7"}, good | {"server": "8"}, 0, "each reads the other's KV"),
            (good, None, 2, f"{decode} does not say which scales it uses; serve with vLLM 0.32 or newer"),
        ):  # fmt: skip
            fake.in_force, other.in_force = own, theirs
            done = fp8kv("verify", directory, "--served", prefill, "--served", decode)
            assert (done.exit_code, said in done.stdout + done.stderr) == (status, True), done.output
        assert [path for path, _ in fake.requests] == ["/v1/fp8kv/scales"] * 9
        done = fp8kv("verify", made / "plain", "--served", prefill, "--served", decode)
        one_line_error(done, f"'{made / 'plain'}' holds no KV-cache scales")
        for twice in (prefill, f"{prefill}/", f"{prefill}/v1", prefill.replace("127.0.0.1", "LOCALHOST")):
            flags = [flag for url in (prefill, decode, twice) for flag in ("--served", url)]
            done = fp8kv("verify", directory, *flags)
            one_line_error(done, f"--served {prefill} and {twice} are one server; give each server once")
    assert len(fake.requests) == 9


def other_tokens(path, answer):
    for row in answer.get("choices", [{}])[0].get("prompt_logprobs", [])[5:]:
        row["999"] = row.pop(next(iter(row)))
    return answer


def counting(count):
    return lambda path, answer: answer | {"usage": {"prompt_tokens": count}}


def sending(content, status=200, where="/v1"):
    return lambda path, answer: (status, content) if where in path else answer


NO_LOGPROBS = sending({"choices": [{"text": ""}]}, where="completions")
VERSION = "answers something else than expected; install the same fp8kv there as here"
STRANGE = "answers something else than expected; give the address of an OpenAI-compatible server"


def test_wrong_answers_are_one_line(fake):
    def small_vocabulary(path, answer):
        body = fake.requests[-1][1] or {}
        return (400, b"") if max(body.get("prompt", [0])) > 9 else answer

    for fake.change, phrases in (
        (
            small_vocabulary,
            ["serves another model: 'm' refuses token ids of 'MODEL'; give the directory and the scales"],
        ),
        (NO_LOGPROBS, ["gives no logprobs, of prompts or of generated tokens", "fp8kv stress"]),
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
            said = refuses(url, "it hung up, or gives no answer in HTTP; does it take http", "see its log")
            assert "is it running" not in said
    with running(fake) as url:
        said = refuses(url.replace("http", "https"), "it gives no answer in TLS; does it take http://?")
    assert "is it running" not in said


def test_causes_that_form_a_circle():
    error, cause = OSError(5, "Input/output error"), ConnectionRefusedError()
    error.__cause__, cause.__context__ = cause, error
    assert _explanation(error).startswith("Connection refused; is it running?")
