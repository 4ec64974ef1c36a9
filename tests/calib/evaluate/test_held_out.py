"""Held-out text is told from what was calibrated on by its contents, however it is given."""

import json
import random
import shutil
from pathlib import Path

import pytest
from command_line import fp8kv, one_line_error, ran, succeeded
from families import save_model, tiny_model

from calib.evaluate import inputs
from calib.evaluate.report import Suite

READ, FRESH = range(40), range(100, 140)  # seeds of rows


def write(path, seeds, each=1):
    rows = [" ".join(f"w{i}" for i in random.Random(n).choices(range(3, 128), k=50)) for n in seeds]
    joined = (" ".join(rows[i : i + each]) for i in range(0, len(rows), each))
    Path(path).write_text("".join(json.dumps({"text": text}) + "\n" for text in joined))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, two texts, and everything that is made of calibrations on the first of them."""
    place = tmp_path_factory.mktemp("held-out")
    save_model(tiny_model("llama", num_hidden_layers=2, hidden_size=32), place / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        write("a.jsonl", READ)
        write("b.jsonl", FRESH)
        small = ("--samples", 40, "--seq-len", 50, "--device", "cpu", "--dtype", "float32", "--quiet")
        for command in (
            ("calibrate", "model", "--dataset", "a.jsonl", "-o", "out", *small),
            ("calibrate", "model", "--dataset", "b.jsonl", "-o", "other", *small),
            ("merge", "other", "out", "-o", "merged"),
            ("apply", "out", "model", "-o", "applied"),
            ("pack", "out", "-o", "packed"),
            ("convert", "out", "--to", "sglang", "-o", "converted"),
            ("convert", "converted", "--to", "vllm", "-o", "back"),
            ("repair", "out", "--stats", "other", "--to", "vllm", "-o", "repaired"),
            ("bake", "model", "--scales", "out", "--for", "fp8", "-o", "baked"),
        ):
            ran(*command)
    return place


@pytest.fixture(autouse=True)
def suite(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setitem(inputs.SUITES, "quick", Suite(4, 4, 40, 0, 0, (), (), 1))


def evaluate(text, *flags, scales=("out",), model="model"):
    given = [part for name in scales for part in ("--scales", name)]
    flags = ("--device", "cpu", "--variants", "tensor", "--json", *flags)
    return fp8kv("eval", model, "--dataset", text, *given, *flags)


def test_text_that_was_calibrated_on_is_refused_however_it_is_given():
    Path("here").mkdir()
    Path("here/link.jsonl").symlink_to("../a.jsonl")
    shutil.copy("a.jsonl", "copy.json")
    write("order.jsonl", reversed(READ))
    write("pairs.jsonl", READ, each=2)
    write("again.jsonl", [*FRESH[:2], *READ, *READ])
    for text, *flags in (
        *(["a.jsonl"], ["here/link.jsonl"], ["copy.json"], ["order.jsonl"], ["pairs.jsonl"], ["again.jsonl"]),
        *(["a.jsonl", "--seed", 1], ["pairs.jsonl", "--seq-len", 80]),
    ):
        one_line_error(evaluate(text, *flags), "'out' read ", "; use another dataset")
    one_line_error(evaluate("b.jsonl", "--also", "copy.json"), "--also", "'out' read ")
    for scales in ("merged", "applied", "packed", "converted", "back", "repaired"):
        one_line_error(evaluate("copy.json", scales=[scales]), f"'{scales}' read ")
    # and what a model was baked with
    one_line_error(evaluate("copy.json", scales=[], model="baked"), "baked' read ")
    # the evaluation does not measure what it calibrates on
    write("one.jsonl", [FRESH[0]] * 60)
    one_line_error(evaluate("one.jsonl", scales=[]), "0 of ", "this evaluation read ")


def test_new_text_is_evaluated_without_a_word_and_what_was_read_is_left_out():
    done = succeeded(evaluate("b.jsonl", scales=["out", "converted"]))
    (line,) = json.loads(done.stdout)["warnings"]
    assert "tokens were read, too few" in line  # by the evaluation itself
    write("mixed.jsonl", [*READ, *FRESH[:20]])
    report = json.loads(succeeded(evaluate("mixed.jsonl")).stdout)
    assert report["data"]["documents"] == 4
    (line,) = [line for line in report["warnings"] if "left out" in line]
    assert "'out' was calibrated on their text" in line


def test_scales_without_a_record_are_warned_of():
    record = Path(shutil.copytree("converted", "old"), "fp8kv_text.json")
    record.unlink()
    warnings = json.loads(evaluate("a.jsonl", scales=["old"]).stdout)["warnings"]
    assert [line for line in warnings if "no record" in line] == [
        "'old' has no record of the text behind its scales, so some of the held-out text may not be new to "
        "it; calibrate again to have one"
    ]
    record.write_text('{"records": [{"salt": 1}]}')
    one_line_error(evaluate("a.jsonl", scales=["old"]), "is damaged (records.0.")


def test_too_little_text_is_refused_as_calibrate_refuses_it(monkeypatch):
    monkeypatch.setitem(inputs.SUITES, "quick", Suite(3, 4, 16, 0, 0, (), (), 1))
    for command in ("eval", "recommend"):
        done = fp8kv(command, "model", "--device", "cpu", "--dataset", "b.jsonl")
        one_line_error(done, "48 tokens, ", "are too few to cal")
    succeeded(evaluate("b.jsonl", "--allow-few-tokens", scales=[]))
