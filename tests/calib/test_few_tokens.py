"""A calibration on next to nothing is refused, and one on little says so wherever it is read."""

import json

import pytest
from command_line import fp8kv, one_line_error, ran
from families import edit_json, save_model

from calib.capture.resume import Share
from calib.scales.stats_file import load_stats

CPU = ("--device", "cpu")


@pytest.fixture
def model(tmp_path, tiny_llama):
    return save_model(tiny_llama, tmp_path / "model")


def dataset(path, lines):
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def words(number, count, first=3, vocabulary=120):
    """A text of `count` words that the tiny models' tokenizer knows."""
    return " ".join(f"w{first + (7 * number + j * j + j) % vocabulary}" for j in range(count))


def calibrated(model, data, *flags, out="out"):
    out = model.parent / out
    done = fp8kv("calibrate", model, "--dataset", data, "-o", out, *CPU, *flags)
    return done, out


def assert_said_everywhere(done, out, *phrases):
    """Each phrase is in one line of the terminal, of the card and of the report."""
    assert done.exit_code == 0, done.stderr
    report = json.loads((out / "fp8kv_calibration.json").read_text())
    places = [
        [line for line in done.stdout.splitlines() if line.startswith("warning: ")],
        [line for line in (out / "README.md").read_text().splitlines() if line.startswith("- ")],
        report["warnings"],
    ]
    for phrase in phrases:
        for lines in places:
            assert sum(phrase in line for line in lines) == 1, (phrase, lines)
    return report


def test_few_tokens_are_refused_unless_flag_or_recipe_allow_them(model, tmp_path):
    data = dataset(tmp_path / "d.jsonl", [words(0, 80)])
    done, out = calibrated(model, data, "--samples", 1, "--seq-len", 2)
    one_line_error(done, "2 tokens, 2 of them different, are too few", "--allow-few-tokens")
    # first tokens that are left out do not count
    done, _ = calibrated(model, data, "--set", "data.skip_first=20")
    one_line_error(done, "60 tokens, ", "are too few")
    assert not out.exists()
    done, out = calibrated(model, data, "--samples", 1, "--seq-len", 2, "--allow-few-tokens")
    report = assert_said_everywhere(done, out, "only 2 tokens were read", "only 2 different tokens")
    assert report["recipe"]["data"]["allow_few_tokens"] is True
    assert report["dataset"]["distinct_tokens"] == 2
    recipe = tmp_path / "few.yaml"
    recipe.write_text(f"data: {{dataset: {data}, samples: 1, seq_len: 9, allow_few_tokens: true}}\n")
    done = fp8kv("calibrate", model, "--recipe", recipe, "-o", tmp_path / "by-recipe", *CPU)
    assert_said_everywhere(done, tmp_path / "by-recipe", "only 9 tokens were read")


def test_a_tokenizer_of_another_class_is_seen(model, tmp_path):
    """Its class builds another tokenizer of the same file, and every text becomes one BOS."""
    bos = {"id": "<s>", "ids": [1], "tokens": ["<s>"]}
    single = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    first = {"type": "TemplateProcessing", "single": single, "pair": single}
    edit_json(model / "tokenizer.json", post_processor=first | {"special_tokens": {"<s>": bos}})
    edit_json(model / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    data = dataset(tmp_path / "d.jsonl", [words(number, 60) for number in range(14)])
    done, out = calibrated(model, data)
    one_line_error(done, "14 tokens, 1 of them different", "840 words became 14 tokens")
    assert not out.exists()
    done, out = calibrated(model, data, "--allow-few-tokens")
    said = ("840 words became 14 tokens", "14 samples are alike: 13 of 14", "only 1 different")
    assert_said_everywhere(done, out, "only 14 tokens", *said)
    # of a text that becomes nothing the tokenizer is to blame, not the data
    edit_json(model / "tokenizer.json", post_processor=None)
    done, _ = calibrated(model, data, "--overwrite")
    one_line_error(done, "the 840 words of dataset", "became no tokens", "tokenizer_config.json")


def test_unknown_words_are_seen(model, tmp_path):
    """The tokenizer writes <pad> for what it does not know, and transformers says it has none."""
    data = dataset(tmp_path / "d.jsonl", ["no word of this is known " * 20 + str(i) for i in "abc"])
    done, out = calibrated(model, data)
    one_line_error(done, "363 tokens, 1 of them", "100% of the tokens are the unknown token")
    assert not out.exists()
    lines = [words(i, 100) + " what nobody knows" * 10 for i in range(12)]
    done, out = calibrated(model, dataset(tmp_path / "some.jsonl", lines))
    report = assert_said_everywhere(done, out, "23% of the tokens are the unknown token")
    assert report["dataset"]["unknown_tokens"] == 12 * 30


def test_samples_that_are_alike_are_seen_and_others_are_not_doubted(model, tmp_path):
    """Also where they differ behind `seq_len`, as chats behind one long system prompt do."""
    lines = [words(0, 120) + " " + words(i, 60, first=9) for i in range(20)]
    flags = ("--seq-len", 100, "--samples", 20)
    done, out = calibrated(model, dataset(tmp_path / "alike.jsonl", lines), *flags)
    report = assert_said_everywhere(done, out, "20 samples are alike: 1,900 of 2,000 tokens repeat")
    assert report["dataset"]["unrepeated_tokens"] == 100
    data = dataset(tmp_path / "enough.jsonl", [words(i, 80, first=3 + i) for i in range(30)])
    done, out = calibrated(model, data, out="enough")
    assert done.exit_code == 0, done.stderr
    warnings = json.loads((out / "fp8kv_calibration.json").read_text())["warnings"]
    text = load_stats(out).text
    assert (text.tokens, text.samples, text.words) == (2400, 30, 2400)
    assert not [line for line in warnings if "tokens were" in line or "samples are alike" in line], warnings


def test_counts_are_right_however_the_text_was_read(model, tmp_path, monkeypatch):
    data = dataset(tmp_path / "d.jsonl", [words(i // 2, 40 + i // 2) for i in range(16)])
    flags = ["--batch-size", 2, "--set", "data.skip_first=3", "--set", "save_minutes=0"]
    done, out = calibrated(model, data, *flags)
    assert done.exit_code == 0, done.stderr
    expected = load_stats(out).text
    assert expected.tokens == load_stats(out).tokens == sum(2 * (37 + i) for i in range(8))
    assert expected.unrepeated_tokens < expected.tokens
    done, out = calibrated(model, data, *flags, "--offload", "layerwise", out="layerwise")
    assert done.exit_code == 0, done.stderr
    assert load_stats(out).text == expected
    read = Share.read

    def stopped(share):
        read(share, 3)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Share, "read", stopped)
        done, _ = calibrated(model, data, *flags, out="resumed")
    assert done.exit_code == 130, done.stderr
    done, out = calibrated(model, data, *flags, "--resume", out="resumed")
    assert done.exit_code == 0, done.stderr
    assert load_stats(out).text == expected


def test_a_merge_counts_what_all_runs_have_read(model, tmp_path):
    runs = []
    for name, first in (("a", 3), ("b", 40)):
        lines = [words(i, 40, first=first, vocabulary=25) for i in range(12)]
        done, out = calibrated(model, dataset(tmp_path / f"{name}.jsonl", lines), out=name)
        assert "only 480 tokens were read" in done.stdout
        assert "different tokens occur" in done.stdout
        runs.append(out)
    done = fp8kv("merge", *runs, "-o", tmp_path / "merged")
    report = assert_said_everywhere(done, tmp_path / "merged", "only 960 tokens were read")
    assert "different tokens occur" not in done.stdout
    assert "480" not in "".join(report["warnings"])
    one, two, both = (load_stats(path).text for path in (*runs, tmp_path / "merged"))
    assert one.distinct_tokens + two.distinct_tokens == report["dataset"]["distinct_tokens"]
    assert both == one.join(two)
    # a third run, and the merged one again
    done, out = calibrated(model, "random", "--samples", 9, "--seq-len", 64, out="c")
    assert done.exit_code == 0, done.stderr
    done = ran("merge", tmp_path / "merged", out, "-o", tmp_path / "all")
    assert "tokens were read" not in done.stdout
    assert load_stats(tmp_path / "all").text.tokens == 960 + 576
