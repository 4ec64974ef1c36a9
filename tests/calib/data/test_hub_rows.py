"""Splits are found, rows are shuffled by the seed, and each failure of the Hub is one clear line.

`datasets` is real throughout: it reads a local directory the way it reads a dataset repository.
Only failures that need a network are raised in its place.
"""

from importlib import import_module

import datasets
import pytest
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from calib.data.hub_rows import find_split, stream_rows
from calib.errors import InputError
from calib.recipe import DataRecipe

# huggingface_hub 1.x uses httpx, 2.x its successor httpx2
httpx = import_module(HTTPError.__module__.partition(".")[0])

CARD = """---
configs:
- config_name: big
  data_files: [{split: test, path: b.jsonl}, {split: train, path: a.jsonl}]
- config_name: odd
  data_files: [{split: night, path: a.jsonl}, {split: day, path: b.jsonl}]
- config_name: chat
  data_files: [{split: train, path: a.jsonl}, {split: train_sft, path: b.jsonl}]
---
"""
OUT = "; with no network use `--dataset builtin:python-docs` or a local file"


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(20)))
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    return str(tmp_path)


def texts(repository, seed):
    recipe = DataRecipe(dataset=repository, config="big", seed=seed)
    return [row["text"] for row in stream_rows(recipe, "train")]


@pytest.mark.parametrize(
    ("config", "split", "found"),
    [("big", None, "train"), ("chat", None, "train_sft"), ("odd", "day", "day")],
)
def test_the_split_asked_for_or_the_preferred_one(repository, config, split, found):
    assert find_split(DataRecipe(dataset=repository, config=config, split=split)) == found


def test_the_order_of_rows_depends_on_the_seed_alone(repository):
    first = texts(repository, seed=1)
    assert sorted(first) == sorted(f"row {i}" for i in range(20))
    assert texts(repository, seed=1) == first
    assert texts(repository, seed=2) != first


@pytest.mark.parametrize(
    ("config", "split", "message"),
    [
        ("big", "dev", "no split 'dev' in dataset '{}'; splits: test, train; choose one with `--set data.sp"),
        ("odd", None, "cannot choose a split of dataset '{}'; splits: night, day; choose one with"),
        ("no", None, "BuilderConfig 'no' not found. Available: ['big', 'odd', 'chat']; choose one"),
        (None, None, "Config name is missing. Please pick one among the available configs: ['big', "),
        (None, None, "'chat']; choose one with `--set data.config=NAME`"),
    ],
)
def test_an_unknown_split_or_config_lists_the_legal_ones(repository, config, split, message):
    with pytest.raises(InputError) as caught:
        find_split(DataRecipe(dataset=repository, config=config, split=split))
    assert message.format(repository) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_of_the_dataset_is_one_line(repository, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ')
    with pytest.raises(InputError, match=r"cannot be read: .*JSON parse error.*; use another data"):
        texts(repository, seed=1)


def caused_by(error, cause):
    error.__cause__ = cause
    return error


def answer(kind, status):
    response = httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))
    return kind(f"{status} answer\n\nof the server", response=response)


UNREACHABLE = [
    ConnectionError("Couldn't reach 'o/d' on the Hub (LocalEntryNotFoundError)"),
    OfflineModeIsEnabled("offline mode is enabled"),
    LocalEntryNotFoundError("not on disk"),
    FileNotFoundError("Couldn't find any data file at /x. LocalEntryNotFoundError: no"),
    httpx.ConnectError("name or service not known"),
    httpx.ReadTimeout("timed out"),
    answer(HfHubHTTPError, 503),
    caused_by(ValueError("The split names could not be parsed"), ConnectionError("gone")),
]
GATED = [
    answer(GatedRepoError, 403),
    DatasetNotFoundError("Dataset 'o/d' is a gated dataset on the Hub. You must be authenticated"),
]
ABSENT = [
    DatasetNotFoundError("Dataset 'o/d' doesn't exist on the Hub or cannot be accessed."),
    FileNotFoundError("Couldn't find any data file at /data/o/d."),
]


def message_for(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "get_dataset_split_names", fail)
    with pytest.raises(InputError) as caught:
        find_split(DataRecipe(dataset="o/d"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("error", UNREACHABLE, ids=lambda e: type(e).__name__)
def test_an_unreachable_hub_names_the_way_out(monkeypatch, error):
    message = message_for(monkeypatch, error)
    assert message.startswith("the Hugging Face Hub cannot be reached for dataset 'o/d' (")
    assert message.endswith(OUT)


def test_a_gated_or_unknown_dataset_says_what_to_do(monkeypatch):
    assert {message_for(monkeypatch, error) for error in GATED} == {
        "dataset 'o/d' is gated: accept its terms on https://huggingface.co/datasets/o/d "
        "and run `hf auth login`, or use an open dataset"
    }
    assert {message_for(monkeypatch, error) for error in ABSENT} == {
        "no dataset 'o/d' on the Hugging Face Hub, or it is private: check the name, "
        "give the path of a local file, or use `--dataset builtin:python-docs`"
    }


def test_another_failure_is_quoted_and_cut(monkeypatch):
    error = RuntimeError("Dataset scripts are no longer supported, but found d.py")
    assert message_for(monkeypatch, error) == (
        "dataset 'o/d' cannot be read: Dataset scripts are no longer supported, but found d.py; "
        "use another dataset or a local file"
    )
    assert len(message_for(monkeypatch, ValueError("page " * 1000))) < 400


def test_a_connection_lost_while_streaming_is_explained(monkeypatch):
    def rows():
        yield {"text": "first"}
        raise httpx.ReadError("connection reset")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: stream)
    with pytest.raises(InputError, match="Hub cannot be reached for dataset 'o/d'"):
        list(stream_rows(DataRecipe(dataset="o/d"), "train"))
