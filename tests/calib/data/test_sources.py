"""A dataset name leads to one source, and the seed alone decides the order of its rows."""

import random
from pydoc_data.topics import topics

import datasets
import pytest

from calib.data.loading import open_source
from calib.errors import InputError
from calib.recipe import DataRecipe

DOCS = "builtin:python-docs"


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


def test_python_docs_shorter_than_one_sample_are_one_piece():
    ((_, row),) = open_source(DataRecipe(dataset=DOCS, seq_len=1_000_000)).rows
    assert row == "\n\n".join(topics[name] for name in sorted(topics))


def test_an_unknown_builtin_lists_the_known():
    message = "no built-in dataset 'builtin:docs'; built in: builtin:python-docs"
    with pytest.raises(InputError, match=message):
        open_source(DataRecipe(dataset="builtin:docs"))


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
