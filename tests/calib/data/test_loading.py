"""The whole way from a recipe to fingerprinted samples: one source, in an order of the seed alone."""

import hashlib
import json
import random
from pydoc_data.topics import topics

import datasets
import pytest

from calib.data import CalibrationData, load_data
from calib.data.loading import open_source
from calib.data.samples import Piece
from calib.recipe import DataRecipe

DOCS = "builtin:python-docs"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def fingerprint(*samples):
    return CalibrationData([Piece(0, len(ids), ids) for ids in samples], "text").fingerprint


def no_model():
    raise AssertionError("text needs no model")


@pytest.fixture
def mixed(tmp_path):
    rows = [{"messages": CHAT}, {"text": "plain"}, {"text": " "}]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "mixed.jsonl")


def test_a_local_file_becomes_samples_with_source_and_warnings(mixed, tokenizer):
    loaded = load_data(DataRecipe(dataset=mixed, split="x", samples=9), tokenizer, no_model)
    texts = {tokenizer.decode(ids) for ids in loaded.samples}
    assert texts == {"<s><|user|>hi<|assistant|>yo", "<s>plain"}
    assert loaded.num_tokens == 7 + 6
    assert loaded.source == mixed
    assert loaded.fingerprint == fingerprint(*loaded.samples)
    assert loaded.warnings == (
        f"data.split 'x' is ignored: dataset '{mixed}' has none",
        f"9 samples were asked for and dataset '{mixed}' has 2; all 2 are used",
    )


def test_python_docs_fill_64_samples_of_512_tokens(tokenizer):
    recipe = DataRecipe(dataset=DOCS, samples=64, seq_len=512)
    loaded = load_data(recipe, tokenizer, no_model)
    assert [len(sample) for sample in loaded.samples] == [512] * 64
    assert (loaded.source, loaded.warnings) == (DOCS, ())
    assert load_data(recipe, tokenizer, no_model) == loaded
    other = load_data(recipe.model_copy(update={"seed": 1}), tokenizer, no_model)
    assert other.fingerprint != loaded.fingerprint


@pytest.mark.parametrize(
    ("dataset", "warning"),
    [
        ("self", "dataset 'self' is text that the model made up"),
        ("random", "dataset 'random' is uniform random token ids, what vLLM's removed on-the-fly"),
    ],
)
def test_generated_samples_come_with_a_warning(tokenizer, tiny_llama, dataset, warning):
    recipe = DataRecipe(dataset=dataset, column="text", samples=3, seq_len=8)
    loaded = load_data(recipe, tokenizer, lambda: tiny_llama)
    assert (len(loaded.samples), loaded.source) == (3, dataset)
    assert loaded.warnings[0].startswith(warning)
    assert loaded.warnings[1] == f"data.column 'text' is ignored: dataset '{dataset}' has none"
    assert loaded == load_data(recipe, tokenizer, lambda: tiny_llama)


def test_the_fingerprint_is_the_sha256_of_lengths_and_ids():
    words = [2, 5, 6, 1, 7]
    expected = hashlib.sha256(b"".join(w.to_bytes(8, "little") for w in words)).hexdigest()
    assert fingerprint([5, 6], [7]) == expected


@pytest.fixture
def ten_lines(tmp_path):
    path = tmp_path / "ten.jsonl"
    path.write_text("".join(f'"line {i}"\n' for i in range(10)))
    return str(path)


def test_local_rows_are_shuffled_by_the_seed(ten_lines):
    order = list(range(10))
    random.Random(7).shuffle(order)
    source = open_source(DataRecipe(dataset=ten_lines, seed=7))
    assert source.name == ten_lines
    assert list(source.rows) == [(f"{ten_lines}, line {i + 1}", f"line {i}") for i in order]
    assert order != sorted(order)


def test_python_docs_are_whole_paragraphs_long_enough_for_a_sample():
    rows = [row for _, row in open_source(DataRecipe(dataset=DOCS, seq_len=512)).rows]
    assert min(map(len, rows)) >= 512 * 6 - len("\n\n")
    text = "\n\n".join(topics[name] for name in sorted(topics))
    assert all(row in text for row in rows)
    # all but what is left after the last piece
    assert len(text) - sum(len(row) + 2 for row in rows) < 512 * 6
    assert len(rows) > 100


def test_settings_without_a_meaning_are_reported(ten_lines):
    recipe = DataRecipe(dataset=DOCS, config="c", split="s", column="x")
    assert open_source(recipe).warnings == (
        f"data.config 'c' is ignored: dataset '{DOCS}' has none",
        f"data.split 's' is ignored: dataset '{DOCS}' has none",
        f"data.column 'x' is ignored: dataset '{DOCS}' has none",
    )
    local = DataRecipe(dataset=ten_lines, split="s", column="x")
    assert open_source(local).warnings == (f"data.split 's' is ignored: dataset '{ten_lines}' has none",)


@pytest.mark.parametrize(("config", "name"), [(None, "o/d [train]"), ("en", "o/d (en) [train]")])
def test_any_other_name_is_a_dataset_on_the_hub(monkeypatch, config, name):
    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.IterableDataset.from_generator(lambda: iter([{"text": "streamed"}]))

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *args: ["test", "train"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source(DataRecipe(dataset="o/d", config=config))
    assert source.name == name
    assert list(source.rows) == [("row 1 as shuffled", {"text": "streamed"})]
    assert asked == [(("o/d", config), {"split": "train", "streaming": True})]


def test_files_of_a_directory_that_are_not_read_are_a_warning(ten_lines, tmp_path):
    assert open_source(DataRecipe(dataset=str(tmp_path))).warnings == ()
    for name in (".DS_Store", ".gitattributes"):
        (tmp_path / name).touch()
    assert open_source(DataRecipe(dataset=str(tmp_path))).warnings == ()
    for name in ("b.csv", *"cdefghij"):
        (tmp_path / name).touch()
    (warning,) = open_source(DataRecipe(dataset=str(tmp_path))).warnings
    assert warning == (
        f"dataset '{tmp_path}': not read are b.csv, c, d, e, f, g, ... (9 in all); "
        "supported: .jsonl, .json, .parquet, .txt, directly in it"
    )
