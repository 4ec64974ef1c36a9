"""Splits are found, rows are shuffled by the seed, and each failure of the Hub is one clear line."""

from importlib import import_module
from unittest.mock import Mock

import datasets
import pytest
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HTTPError, LocalEntryNotFoundError

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


@pytest.fixture
def repository(tmp_path):  # `datasets` reads a local directory as it reads a repository
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(20)))
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    return str(tmp_path)


def test_the_split_asked_for_or_the_preferred_one(repository):
    for config, split, found in (("big", None, "train"), ("chat", None, "train_sft"), ("odd", "day", "day")):
        assert find_split(DataRecipe(dataset=repository, config=config, split=split)) == found


def test_the_order_of_rows_depends_on_the_seed_alone(repository, tmp_path):
    def texts(seed):
        recipe = DataRecipe(dataset=repository, config="big", seed=seed)
        return [row["text"] for row in stream_rows(recipe, "train")]

    first = texts(seed=1)
    assert sorted(first) == sorted(f"row {i}" for i in range(20))
    assert texts(seed=1) == first != texts(seed=2)
    (tmp_path / "a.jsonl").write_text('{"text": ')
    with pytest.raises(InputError, match=r"cannot be read: .*JSON parse error.*; use another data"):
        texts(seed=1)


def test_an_unknown_split_or_config_lists_the_legal_ones(repository):
    for config, split, message in (
        ("big", "dev", "no split 'dev' in dataset '{}'; splits: test, train; choose one with `--set data.sp"),
        ("odd", None, "cannot choose a split of dataset '{}'; splits: night, day; choose one with"),
        ("no", None, "BuilderConfig 'no' not found. Available: ['big', 'odd', 'chat']; choose one"),
        (None, None, "Config name is missing. Please pick one among the available configs: ['big', "),
        (None, None, "'chat']; choose one with `--set data.config=NAME`"),
    ):
        with pytest.raises(InputError) as caught:
            find_split(DataRecipe(dataset=repository, config=config, split=split))
        assert message.format(repository) in str(caught.value)


def answer(kind, status):
    response = httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))
    return kind(f"{status} answer\n\nof the server", response=response)


LOST = ValueError("no split names")
LOST.__cause__ = ConnectionError("gone")
UNREACHABLE = (
    "the Hugging Face Hub cannot be reached for dataset 'o/d' (",
    "; with no network use `--dataset builtin:python-docs` or a local file",
)
GATED = (
    "dataset 'o/d' is gated: accept its terms on https://huggingface.co/datasets/o/d ",
    "and run `hf auth login`, or use an open dataset",
)
ABSENT = (
    "no dataset 'o/d' on the Hugging Face Hub, or it is private: check the name, ",
    "give the path of a local file, or use `--dataset builtin:python-docs`",
)
QUOTED = "dataset 'o/d' cannot be read: ", "; use another dataset or a local file"


def test_what_the_hub_fails_with_is_one_line_that_says_what_to_do(monkeypatch):
    for error, expected in (
        (ConnectionError("Couldn't reach 'o/d' on the Hub (LocalEntryNotFoundError)"), UNREACHABLE),
        (LocalEntryNotFoundError("not on disk"), UNREACHABLE),
        (FileNotFoundError("Couldn't find any data file at /x. LocalEntryNotFoundError: no"), UNREACHABLE),
        (answer(HfHubHTTPError, 503), UNREACHABLE),
        (LOST, UNREACHABLE),
        (answer(GatedRepoError, 403), GATED),
        (DatasetNotFoundError("Dataset 'o/d' is a gated dataset on the Hub. You must be au"), GATED),
        (DatasetNotFoundError("Dataset 'o/d' doesn't exist on the Hub or cannot be accessed."), ABSENT),
        (FileNotFoundError("Couldn't find any data file at /data/o/d."), ABSENT),
        (RuntimeError("Dataset scripts are no longer supported, but found d.py"), QUOTED),
        (ValueError("page " * 1000), QUOTED),
    ):
        monkeypatch.setattr(datasets, "get_dataset_split_names", Mock(side_effect=error))
        with pytest.raises(InputError) as caught:
            find_split(DataRecipe(dataset="o/d"))
        message, (begins, ends) = str(caught.value), expected
        assert message.startswith(begins)
        assert message.endswith(ends)
        if expected in (GATED, ABSENT):
            assert message == begins + ends
        elif len(str(error)) < 100:
            assert " ".join(str(error).split()) in message
        assert len(message) < 400
