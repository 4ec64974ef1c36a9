"""How much text is read: next to nothing is refused, little is said, the rest of a book is held out."""

import json
import random

import pytest
from command_line import fp8kv, one_line_error, ran, succeeded
from families import edit_json

from calib.capture.resume import Share
from calib.data import load_data
from calib.evaluate import inputs
from calib.evaluate.held_out import find_readers
from calib.evaluate.variants import Setup
from calib.models.config import load_config
from calib.models.load import load_model, load_tokenizer
from calib.models.sources import find_model
from calib.recipe import load_recipe
from calib.scales.stats_file import load_records, load_stats

WORDS = 4000  # of the book


def words(number, count, first=3, vocabulary=120):
    """A text of `count` words that the tiny models' tokenizer knows."""
    return " ".join(f"w{first + (7 * number + j * j + j) % vocabulary}" for j in range(count))


def calibrated(model, lines, *flags, out="out"):
    """The result of a calibration on these lines, and its directory."""
    data, out = model.parent / f"{out}.jsonl", model.parent / out
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return fp8kv("calibrate", model, "--dataset", data, "-o", out, "--device", "cpu", *flags), out


def assert_said_everywhere(done, out, *phrases):
    """Each phrase is in one line of the terminal, of the card and of the report."""
    report = json.loads((out / "fp8kv_calibration.json").read_text())
    places = [
        [line for line in succeeded(done).stderr.splitlines() if line.startswith("warning: ")],
        [line for line in (out / "README.md").read_text().splitlines() if line.startswith("- ")],
        report["warnings"],
    ]
    for phrase in phrases:
        for lines in places:
            assert sum(phrase in line for line in lines) == 1, (phrase, lines)
    return report


def test_few_tokens_are_refused_unless_flag_or_recipe_allow_them(tiny_directory, tmp_path):
    short = ("--samples", 1, "--seq-len", 2)
    done, out = calibrated(tiny_directory, [words(0, 80)], *short)
    one_line_error(done, "2 tokens, 2 of them different, are too few", "--allow-few-tokens")
    # first tokens that are left out do not count
    done, _ = calibrated(tiny_directory, [words(0, 80)], "--set", "data.skip_first=20")
    one_line_error(done, "60 tokens, ", "are too few")
    assert not out.exists()
    done, out = calibrated(tiny_directory, [words(0, 80)], *short, "--allow-few-tokens")
    report = assert_said_everywhere(done, out, "only 2 tokens were read", "only 2 different tokens")
    assert report["recipe"]["data"]["allow_few_tokens"] is True
    assert report["dataset"]["distinct_tokens"] == 2
    recipe = tmp_path / "few.yaml"
    recipe.write_text("data: {samples: 1, seq_len: 9, allow_few_tokens: true}\n")
    done, out = calibrated(tiny_directory, [words(0, 80)], "--recipe", recipe, out="by-recipe")
    assert_said_everywhere(done, out, "only 9 tokens were read")


def test_a_tokenizer_of_another_class_is_seen(tiny_directory):
    """Its class builds another tokenizer of the same file, and every text becomes one BOS."""
    bos = {"id": "<s>", "ids": [1], "tokens": ["<s>"]}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    first = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {"<s>": bos}}
    edit_json(tiny_directory / "tokenizer.json", post_processor=first)
    edit_json(tiny_directory / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    lines = [words(number, 60) for number in range(14)]
    done, out = calibrated(tiny_directory, lines)
    one_line_error(done, "14 tokens, 1 of them different", "840 words became 14 tokens")
    assert not out.exists()
    done, out = calibrated(tiny_directory, lines, "--allow-few-tokens")
    said = ("840 words became 14 tokens", "14 samples are alike: 13 of 14", "only 1 different")
    assert_said_everywhere(done, out, "only 14 tokens", *said)
    # of a text that becomes nothing the tokenizer is to blame, not the data
    edit_json(tiny_directory / "tokenizer.json", post_processor=None)
    done, _ = calibrated(tiny_directory, lines, "--overwrite")
    one_line_error(done, "the 840 words of dataset", "became no tokens", "tokenizer_config.json")


def test_unknown_words_and_samples_that_are_alike_are_seen(tiny_directory):
    # the tokenizer writes <pad> for what it does not know, and transformers says it has none
    done, out = calibrated(tiny_directory, ["no word of this is known " * 20 + str(i) for i in "abc"])
    one_line_error(done, "363 tokens, 1 of them", "100% of the tokens are the unknown token")
    assert not out.exists()
    lines = [words(i, 100) + " what nobody knows" * 10 for i in range(12)]
    result = calibrated(tiny_directory, lines)
    report = assert_said_everywhere(*result, "23% of the tokens are the unknown token")
    assert report["dataset"]["unknown_tokens"] == 12 * 30
    # alike but behind `seq_len`, as chats behind one long system prompt are
    lines = [words(0, 120) + " " + words(i, 60, first=9) for i in range(20)]
    result = calibrated(tiny_directory, lines, "--seq-len", 100, "--samples", 20, out="alike")
    report = assert_said_everywhere(*result, "20 samples are alike: 1,900 of 2,000 tokens repeat")
    assert report["dataset"]["unrepeated_tokens"] == 100


def test_counts_are_right_however_the_text_was_read(tiny_directory, monkeypatch):
    lines = [words(i // 2, 40 + i // 2) for i in range(16)]
    flags = ["--batch-size", 2, "--set", "data.skip_first=3", "--set", "save_minutes=0"]
    expected = load_stats(calibrated(tiny_directory, lines, *flags)[1]).text
    assert (expected.tokens, expected.samples) == (sum(2 * (37 + i) for i in range(8)), 16)
    assert expected.words == expected.tokens + 16 * 3
    assert expected.unrepeated_tokens < expected.tokens
    _, out = calibrated(tiny_directory, lines, *flags, "--offload", "layerwise", out="layerwise")
    assert load_stats(out).text == expected
    read = Share.read

    def stopped(share):
        read(share, 3)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Share, "read", stopped)
        assert calibrated(tiny_directory, lines, *flags, out="resumed")[0].exit_code == 130
    _, out = calibrated(tiny_directory, lines, *flags, "--resume", out="resumed")
    assert load_stats(out).text == expected


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(" ".join(f"w{3 + (j * j + 7 * j // 31) % 97}" for j in range(WORDS)))
    return path


def read_book(model, book, out, *flags):
    done = ran("calibrate", model, "--dataset", book, "-o", out, *flags, "--device", "cpu")
    return done.stdout, json.loads((out / "fp8kv_calibration.json").read_text())


@pytest.fixture(scope="module")
def first(model, book, tmp_path_factory):
    """The directory of a calibration on a part of the book, what it printed and its report."""
    out = tmp_path_factory.mktemp("out") / "scales"
    return out, *read_book(model, book, out, "--samples", 12, "--seq-len", 32)


def test_what_was_read_of_a_book_is_said_and_a_merge_adds_it(first, model, book, tmp_path):
    out, printed, report = first
    left = WORDS - 12 * 32
    line = f"documents: 1, samples: 12; 384 tokens read, {left:,} left unread"
    assert line in " ".join(printed.split())
    assert line in report["expected"]
    assert f"in 12 samples (documents: 1; {left} tokens were left unread)" in (out / "README.md").read_text()
    assert not any("asked for" in warning for warning in report["warnings"])
    read_book(model, book, tmp_path / "b", "--seed", 1, "--samples", 5, "--seq-len", 40)
    merged, both = fp8kv("merge", out, tmp_path / "b", "-o", tmp_path / "both"), tmp_path / "both"
    report_of_both = assert_said_everywhere(merged, both, "only 584 tokens were read")
    assert "only 384" not in "".join(report_of_both["warnings"])
    added = (2, 12 + 5, 384 + 5 * 40, left + WORDS - 5 * 40)
    for said, facts in ((report, (1, 12, 384, left)), (report_of_both, added)):
        assert tuple(said["dataset"][x] for x in ("documents", "samples", "tokens", "unread_tokens")) == facts
    one, two, joined = (load_stats(path).text for path in (out, tmp_path / "b", both))
    assert joined == one.join(two)


def test_what_a_run_that_stopped_early_did_not_read_is_left(model, book, tmp_path):
    longer = tmp_path / "longer.txt"
    longer.write_text(" ".join([book.read_text()] * 4))
    flags = ("--samples", 4000, "--seq-len", 16, "--until", 1, "--batch-size", 64)
    dataset = read_book(model, longer, tmp_path / "out", *flags)[1]["dataset"]
    assert 8192 <= dataset["tokens"] < 4 * WORDS == dataset["tokens"] + dataset["unread_tokens"]
    assert (dataset["samples"], dataset["documents"]) == (dataset["tokens"] / 16, 1)
    (record,) = load_records(tmp_path / "out")
    assert record.tokens == dataset["tokens"]  # what was left unread is new to the scales


def test_the_rest_of_a_book_is_held_out(first, model, book):
    small = {"evaluation.samples": 6, "evaluation.seq_len": 32, "device": "cpu"}
    recipe, checkpoint = load_recipe(None, {"data.dataset": str(book), **small}), find_model(str(model))
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
    pieces = [words[i : i + 32] for i in range(0, len(words), 32)]
    assert len({pieces.index(ids) for ids in (*known, *held_out)}) == 18
    (warning,) = (line for line in warnings if "samples come from" in line)
    assert warning.startswith(f"the {len(text.documents)} held-out samples come from 1 document: ")


def test_until_counts_repeated_text_once(tiny_directory, tmp_path):
    """400 samples of 128 tokens that share 120 hold 3,000 or so that are new: all of them are read."""
    shared, rows = " ".join(f"w{i % 60}" for i in range(119)), []
    words = random.Random(0)
    for _ in range(400):
        rows.append({"text": f"{shared} " + " ".join(f"w{words.randrange(60)}" for _ in range(8))})
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--dataset", data, "--samples", 400, "--seq-len", 128, "--until", 0.05, "--headroom", "auto")
    said = " ".join(ran("calibrate", tiny_directory, *flags, "-o", tmp_path / "out").stdout.split())
    new = load_stats(tmp_path / "out").text.unrepeated_tokens
    assert f"the next {4 * new:,} are expected" in said
