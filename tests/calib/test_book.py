"""One long document is enough: to calibrate on, to stop early in, and to measure on the rest of."""

import json

import pytest
from command_line import fp8kv, one_line_error, ran
from families import FAMILIES, save_model, tiny_model

from calib.data import load_data
from calib.evaluate import inputs
from calib.evaluate.held_out import find_readers
from calib.evaluate.variants import Setup
from calib.models.config import load_config
from calib.models.load import load_model, load_tokenizer
from calib.models.sources import find_model
from calib.recipe import load_recipe
from calib.scales.stats_file import load_records

WORDS = 4000
CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tiny = tiny_model("mistral", **FAMILIES["mistral"])
    return save_model(tiny, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(" ".join(f"w{3 + (j * j + 7 * j // 31) % 97}" for j in range(WORDS)))
    return path


def calibrated(model, book, out, *flags):
    done = ran("calibrate", model, "--dataset", book, "-o", out, *map(str, flags), *CPU)
    return done.stdout, json.loads((out / "fp8kv_calibration.json").read_text())


@pytest.fixture(scope="module")
def first(model, book, tmp_path_factory):
    """The directory of a calibration on a part of the book, what it printed and its report."""
    out = tmp_path_factory.mktemp("out") / "scales"
    return out, *calibrated(model, book, out, "--samples", 12, "--seq-len", 32)


def test_summary_card_and_report_say_what_was_read_and_what_was_not(first):
    out, printed, report = first
    left = WORDS - 12 * 32
    line = f"documents: 1, samples: 12; 384 tokens read, {left:,} left unread"
    assert line in " ".join(printed.split())
    facts = {name: report["dataset"][name] for name in ("documents", "samples", "tokens", "unread_tokens")}
    assert facts == {"documents": 1, "samples": 12, "tokens": 384, "unread_tokens": left}
    assert line in report["expected"]
    card = (out / "README.md").read_text()
    assert f"in 12 samples (documents: 1; {left} tokens were left unread)" in card
    assert not any("asked for" in warning for warning in report["warnings"])


def test_what_a_run_that_stopped_early_did_not_read_is_left(model, book, tmp_path):
    longer = tmp_path / "longer.txt"
    longer.write_text(" ".join([book.read_text()] * 4))
    flags = ("--samples", 4000, "--seq-len", 16, "--until", 1, "--batch-size", 64)
    dataset = calibrated(model, longer, tmp_path / "out", *flags)[1]["dataset"]
    assert 8192 <= dataset["tokens"] < 4 * WORDS == dataset["tokens"] + dataset["unread_tokens"]
    assert dataset["samples"] == dataset["tokens"] / 16
    assert dataset["documents"] == 1
    (record,) = load_records(tmp_path / "out")
    assert record.tokens == dataset["tokens"]  # what was left unread is new to the scales


def test_merged_runs_add_what_they_left(first, model, book, tmp_path):
    flags = ("--seed", 1, "--samples", 5, "--seq-len", 40)
    second = calibrated(model, book, tmp_path / "b", *flags)[1]["dataset"]
    ran("merge", first[0], tmp_path / "b", "-o", tmp_path / "both")
    both = json.loads((tmp_path / "both/fp8kv_calibration.json").read_text())["dataset"]
    for name in ("documents", "samples", "tokens", "unread_tokens"):
        assert both[name] == first[2]["dataset"][name] + second[name] > 0


def test_the_rest_of_a_book_is_held_out(first, model, book):
    small = {"evaluation.samples": 6, "evaluation.seq_len": 32, "device": "cpu"}
    recipe = load_recipe(None, {"data.dataset": str(book), **small})
    checkpoint = find_model(str(model))
    config = load_config(checkpoint)
    suite, _ = inputs.fit_suite(config, recipe.evaluation, None)
    recipe = inputs.complete_recipe(recipe, suite)
    setup = Setup(load_model(checkpoint, config, recipe.dtype, recipe.device), load_tokenizer(checkpoint))
    readers, _ = find_readers([first[0]], checkpoint.path)
    text, warnings = inputs.load_text(setup, recipe, suite, readers)
    read = load_recipe(str(first[0] / "fp8kv_calibration.json")).data
    known = load_data(read, setup.tokenizer, None).samples
    assert text.data.samples[:12] == known
    held_out = [document.tolist() for document in text.documents]
    assert len(held_out) == 6
    words = load_data(read.model_copy(update={"seq_len": WORDS}), setup.tokenizer, None).samples[0]
    places = [places_of(ids, words) for ids in (*known, *held_out)]
    assert len(set().union(*places)) == 18 * 32
    (warning,) = (line for line in warnings if "are pieces of" in line)
    assert warning.startswith(f"the {len(text.data.samples)} samples are pieces of fewer documents (1)")


def places_of(ids, words):
    (start,) = (i for i in range(0, len(words), 32) if words[i : i + 32] == ids)
    return set(range(start, start + 32))


def test_a_book_is_evaluated_on_unless_it_is_too_short_to_hold_anything_out(first, model, book, tmp_path):
    lengths = ("--samples", 4, "--seq-len", 32, *CPU)
    flags = ("--variants", "none", "-o", tmp_path / "report")
    ran("eval", model, "--dataset", book, "--scales", first[0], *lengths, *flags)
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert (report["data"]["documents"], report["data"]["tokens"]) == (4, 4 * 32)
    assert any("are pieces of fewer documents (1)" in line for line in report["warnings"])
    (tmp_path / "short.txt").write_text(" ".join(f"w{3 + j}" for j in range(90)))
    done = fp8kv("eval", model, "--dataset", tmp_path / "short.txt", *lengths)
    one_line_error(done, "has 3 samples, and 16 are needed, 12 of them to calibrate on")
