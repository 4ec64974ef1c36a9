"""Held-out text is told from what was calibrated on by its contents, however it is given."""

import json
import random
import shutil

import pytest
from command_line import fp8kv, one_line_error, ran, succeeded
from families import save_model, tiny_model

from calib.evaluate import inputs
from calib.evaluate.report import Suite

SUITE = Suite(4, 4, 40, 0, 0, (), (), 1)
READ, FRESH = range(40), range(100, 140)  # seeds of rows


def row(seed):
    return " ".join(f"w{i}" for i in random.Random(seed).choices(range(3, 128), k=50))


def write(path, seeds, each=1):
    rows = [row(seed) for seed in seeds]
    joined = (" ".join(rows[i : i + each]) for i in range(0, len(rows), each))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in joined))
    return path


def calibrate(model, text, out):
    small = ("--samples", 40, "--seq-len", 50, "--device", "cpu", "--dtype", "float32", "--quiet")
    ran("calibrate", model, "--dataset", text, "-o", out, *small)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A model, two texts, and everything that is made of calibrations on the first of them."""
    place = tmp_path_factory.mktemp("held-out")
    model, out = place / "model", place / "out"
    save_model(tiny_model("llama", num_hidden_layers=2, hidden_size=32), model)
    text, other = write(place / "a.jsonl", READ), write(place / "b.jsonl", FRESH)
    calibrate(model, text, out)
    calibrate(model, other, place / "other")
    (place / "here").mkdir()
    (place / "here/link.jsonl").symlink_to(text)
    shutil.copy(text, place / "copy.json")
    write(place / "order.jsonl", reversed(READ))
    write(place / "pairs.jsonl", READ, each=2)
    write(place / "again.jsonl", [*FRESH[:2], *READ, *READ])
    for command in (
        ("merge", place / "other", out, "-o", place / "merged"),
        ("apply", out, model, "-o", place / "applied"),
        ("pack", out, "-o", place / "packed"),
        ("convert", out, "--to", "sglang", "-o", place / "converted"),
        ("convert", place / "converted", "--to", "vllm", "-o", place / "back"),
        ("repair", out, "--stats", place / "other", "--to", "vllm", "-o", place / "repaired"),
        ("bake", model, "--scales", out, "--for", "fp8", "-o", place / "baked"),
    ):
        done = fp8kv(*command)
        assert done.exit_code == 0, (command, done.stderr)
    return place


@pytest.fixture(autouse=True)
def quick_suite(monkeypatch):
    monkeypatch.setitem(inputs.SUITES, "quick", SUITE)


def evaluate(places, text, scales=("out",), model="model", flags=()):
    given = [part for name in scales for part in ("--scales", places / name)]
    flags = ("--device", "cpu", "--variants", "tensor", "--json", *flags)
    return fp8kv("eval", places / model, "--dataset", text, *given, *flags)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("a.jsonl", ()),
        ("here/link.jsonl", ()),
        ("copy.json", ()),
        ("order.jsonl", ()),
        ("pairs.jsonl", ()),
        ("again.jsonl", ()),
        ("a.jsonl", ("--seed", 1)),
        ("pairs.jsonl", ("--seq-len", 80)),
    ],
)
def test_text_that_was_calibrated_on_is_refused_however_it_is_given(places, text, flags, monkeypatch):
    monkeypatch.chdir(places)
    done = evaluate(places, text, flags=flags)
    one_line_error(done, f"'{places / 'out'}' read ", "; use another dataset")


@pytest.mark.parametrize("scales", ["merged", "applied", "packed", "converted", "back", "repaired"])
def test_every_directory_keeps_what_its_scales_were_calibrated_on(places, scales):
    done = evaluate(places, places / "copy.json", (scales,))
    one_line_error(done, f"'{places / scales}' read ")


def test_a_baked_model_keeps_what_its_factors_were_made_of(places):
    done = evaluate(places, places / "copy.json", (), "baked")
    one_line_error(done, f"'{places / 'baked'}' read ")


def test_new_text_is_evaluated_without_a_word(places):
    done = succeeded(evaluate(places, places / "b.jsonl", ("out", "converted")))
    (line,) = json.loads(done.stdout)["warnings"]
    assert "tokens were read, too few" in line  # by the evaluation itself


def test_what_was_read_is_left_out_and_the_next_are_taken(places):
    done = succeeded(evaluate(places, write(places / "mixed.jsonl", [*READ, *FRESH[:20]])))
    report = json.loads(done.stdout)
    assert report["data"]["documents"] == SUITE.documents
    (line,) = [line for line in report["warnings"] if "left out" in line]
    assert f"'{places / 'out'}' was calibrated on their text" in line


def test_the_evaluation_does_not_measure_what_it_calibrates_on(places):
    done = evaluate(places, write(places / "one.jsonl", [FRESH[0]] * 60), ())
    one_line_error(done, "0 of ", "this evaluation read ")


def test_other_text_is_held_to_the_same(places):
    done = evaluate(places, places / "b.jsonl", flags=("--also", places / "copy.json"))
    one_line_error(done, "--also", f"'{places / 'out'}' read ")


def test_scales_without_a_record_are_warned_of(places, tmp_path):
    old = shutil.copytree(places / "converted", tmp_path / "old")
    (old / "fp8kv_text.json").unlink()
    done = evaluate(places, places / "a.jsonl", (old,))
    lines = [line for line in json.loads(done.stdout)["warnings"] if "no record" in line]
    assert lines == [
        f"'{old}' has no record of the text behind its scales, so some of the held-out text may "
        "not be new to it; calibrate again to have one"
    ]
    (old / "fp8kv_text.json").write_text('{"records": [{"salt": 1}]}')
    one_line_error(evaluate(places, places / "a.jsonl", (old,)), "is damaged (records.0.")


def test_too_little_text_is_refused_as_calibrate_refuses_it(places, monkeypatch):
    monkeypatch.setitem(inputs.SUITES, "quick", Suite(3, 4, 16, 0, 0, (), (), 1))
    flags = ("--device", "cpu", "--dataset", places / "b.jsonl")
    for command in ("eval", "recommend"):
        one_line_error(fp8kv(command, places / "model", *flags), "48 tokens, ", "are too few to cal")
    succeeded(evaluate(places, places / "b.jsonl", (), flags=("--allow-few-tokens",)))
