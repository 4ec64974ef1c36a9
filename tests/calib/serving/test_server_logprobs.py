"""`fp8kv verify --served`: a server with the scales, and one at 1.0."""

import json
import re
import time

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error
from fake_server import facts, serving, verify
from families import save_model, tiny_model

import calib.serving.server_logprobs
from calib.files.strict_json import json_text
from calib.serving.client import Answers
from calib.serving.server_logprobs import compare, decide


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
    far, apart = re.search(r"by 0.0000 nats .*, by (.+) from it at 1.0 \((.+) between", lines[1]).groups()
    assert float(far) == pytest.approx(float(apart), rel=1e-3, abs=1e-4) != 0
    assert "logprobs of 686 given tokens; 14 requests in" in lines[2]
    assert re.search(r" in \d+\.\d s, our own runs in \d+\.\d s\)$", lines[2])
    assert "most of the scales, or a 16-bit cache" in lines[3]
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
    fake.noise = 2.0
    found = facts(verify(fake, directory, "--json"))
    assert found["nearer"] == "cannot tell"
    assert 1 < found["noise"] < 4


def test_another_model_tells_nothing(fake, directory):
    fake.model, fake.scales = tiny_model("gpt_neox"), None
    assert facts(verify(fake, directory, "--json"))["nearer"] == "cannot tell"


def test_scales_of_another_model_are_refused_before_a_server_is_asked(fake, directory, tmp_path):
    other = save_model(tiny_model("gpt_neox"), tmp_path / "other")
    done = verify(fake, directory, "--model", other)
    one_line_error(done, f"'{directory}' is of another model", "llama", "gpt_neox")
    assert fake.requests == []


def test_asking_and_our_own_runs_have_their_times(fake, directory, monkeypatch):
    load = calib.serving.server_logprobs.load_model
    monkeypatch.setattr("calib.serving.server_logprobs.load_model", lambda *a: time.sleep(0.4) or load(*a))
    fake.wait = lambda number: time.sleep(0.1)
    start = time.monotonic()
    found = facts(verify(fake, directory, "--json"))
    assert found["seconds"] > 0.1 * found["requests"]
    assert found["own_seconds"] > 0.8
    assert found["seconds"] + found["own_seconds"] < time.monotonic() - start


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
        (5.0, 4.9, 1.0, 0.0, 0.01, "cannot tell"),
        (8.0, 5.0, 4.7, 0.0, 0.1, "cannot tell"),
        (3.0, 1.8, 4.7, 0.0, 0.1, "cannot tell"),  # some of the scales, perhaps
        (0.9, 3.9, 4.0, 0.0, 0.01, "scales"),  # most of them
        (1.2, 4.0, 4.7, 0.0, 0.1, "cannot tell"),
        (0.0, 0.0, 0.0, 0.0, 0.0, "cannot tell"),
        (0.1, NAN, NAN, 0.0, 0.1, "cannot tell"),
        (NAN, NAN, 4.7, NAN, 0.1, "cannot tell"),
        (0.2, 4.7, 4.7, 0.0, NAN, "cannot tell"),
    ],
)
def test_the_rule(to_scales, to_ones, apart, noise, rounding, said):
    assert decide(to_scales, to_ones, apart, noise, rounding) == said


def test_what_is_not_a_number_is_null_in_json():
    answers = Answers([[1, 2]], True, [[-1.0]], [[-1.5]], 4, 0.5)
    comparison = compare(answers, *(torch.tensor([x]) for x in (-1.0, NAN, -1.25)), 2.0)
    found = json.loads(json_text(comparison.to_json()))
    nats = {"to_scales": 0.0, "to_ones": None, "apart": None, "noise": 0.5, "rounding": 0.25}
    rest = {"logprobs": 1, "of_prompt": True, "requests": 4, "seconds": 0.5, "own_seconds": 2.0}
    assert found == {"nearer": "cannot tell", **nats, **rest}


def test_flags_that_mean_nothing(directory):
    one_line_error(fp8kv("verify", directory, "--model", directory), "--model", "without --served")
    flags = ["--served", "http://x", "--engine", "vllm", "--tensor-parallel-size", "1"]
    done = fp8kv("verify", directory, *flags)
    one_line_error(done, "--engine, --tensor-parallel-size means nothing with --served")


def test_what_is_wrong_here_is_said_before_a_server_is_asked(fake, made):
    one_line_error(verify(fake, made / "twin"), "holds no KV-cache scales")
    one_line_error(verify(fake, made / "twin-fp8kv", "--model", "./gone"), "does not exist")
    assert fake.requests == []
