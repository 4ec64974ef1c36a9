"""Rows of the Hub and of local files come in their order, or an error says in one line what to do.

`datasets` reads a local directory the way it reads a repository; failures of a network are raised.
"""

from importlib import import_module
from unittest.mock import Mock

import datasets
import pyarrow as pa
import pytest
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HTTPError, LocalEntryNotFoundError
from pyarrow import parquet

from calib.data.hub_rows import find_split, stream_rows
from calib.data.local_rows import looks_local, open_rows
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
def repository(tmp_path):
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


def caused_by(error, cause):
    error.__cause__ = cause
    return error


def answer(kind, status):
    response = httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))
    return kind(f"{status} answer\n\nof the server", response=response)


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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionError("Couldn't reach 'o/d' on the Hub (LocalEntryNotFoundError)"), UNREACHABLE),
        (LocalEntryNotFoundError("not on disk"), UNREACHABLE),
        (FileNotFoundError("Couldn't find any data file at /x. LocalEntryNotFoundError: no"), UNREACHABLE),
        (httpx.ReadTimeout("timed out"), UNREACHABLE),
        (TimeoutError("timed out"), UNREACHABLE),
        (answer(HfHubHTTPError, 503), UNREACHABLE),
        (caused_by(ValueError("no split names"), ConnectionError("gone")), UNREACHABLE),
        (answer(GatedRepoError, 403), GATED),
        (DatasetNotFoundError("Dataset 'o/d' is a gated dataset on the Hub. You must be au"), GATED),
        (DatasetNotFoundError("Dataset 'o/d' doesn't exist on the Hub or cannot be accessed."), ABSENT),
        (FileNotFoundError("Couldn't find any data file at /data/o/d."), ABSENT),
        (RuntimeError("Dataset scripts are no longer supported, but found d.py"), QUOTED),
        (ValueError("page " * 1000), QUOTED),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_hub_fails_with_is_one_line_that_says_what_to_do(error, expected, monkeypatch):
    monkeypatch.setattr(datasets, "get_dataset_split_names", Mock(side_effect=error))
    with pytest.raises(InputError) as caught:
        find_split(DataRecipe(dataset="o/d"))
    message, (begins, ends) = str(caught.value), expected
    assert message.startswith(begins)
    assert message.endswith(ends)
    assert "\n" not in message
    if expected in (GATED, ABSENT):
        assert message == begins + ends
    elif len(str(error)) < 100:
        assert " ".join(str(error).split()) in message
    assert len(message) < 400


def located_rows(path):
    rows = open_rows(str(path))
    return [rows[i] for i in range(len(rows))]


def rows_of(path):
    return [row for _, row in located_rows(path)]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        # U+2028 ends a line for str.splitlines, but not in JSON lines
        (
            "a.jsonl",
            '\ufeff{"text": "a\u2028b"}\n\n"bare"\r\n{"n": 1}',
            [{"text": "a\u2028b"}, "bare", {"n": 1}],
        ),
        ("a.json", '[{"text": "a"},\n "b"]', [{"text": "a"}, "b"]),
        ("a.json", '{"text": "a"}', [{"text": "a"}]),
        ("a.json", '{"text": "a"}\n{"text": "b"}\n', [{"text": "a"}, {"text": "b"}]),
        ("a.txt", "one\n\ntwo\n", ["one\n\ntwo\n"]),
    ],
)
def test_text_and_json(name, text, rows, tmp_path):
    assert rows_of(write(tmp_path / name, text)) == rows


@pytest.mark.parametrize("row_group_size", [1, 7, 40])
def test_parquet_rows_across_more_row_groups_than_are_kept(tmp_path, row_group_size):
    rows = [{"text": f"t{i}", "n": i} for i in range(40)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=row_group_size)
    assert rows_of(tmp_path / "a.parquet") == rows


def test_a_directory_is_its_readable_files_by_name_and_every_row_says_where_it_is(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", '"a1"\n\n"a2"\n')
    write(tmp_path / "C.JSON", '["c1", "c2"]')
    parquet.write_table(pa.Table.from_pylist([{"n": 1}] * 2), tmp_path / "d.parquet")
    write(tmp_path / "e.txt", "e")
    write(tmp_path / "empty.jsonl", "")
    parquet.ParquetWriter(tmp_path / "empty.parquet", pa.schema({"text": pa.string()})).close()
    write(tmp_path / "README.md", "not data")
    (tmp_path / "sub.txt").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert located_rows(f"~/{tmp_path.name}") == [
        (f"{tmp_path}/C.JSON, row 1", "c1"),
        (f"{tmp_path}/C.JSON, row 2", "c2"),
        (f"{tmp_path}/a.jsonl, line 1", "a1"),
        (f"{tmp_path}/a.jsonl, line 3", "a2"),
        (f"{tmp_path}/d.parquet, row 1", {"n": 1}),
        (f"{tmp_path}/d.parquet, row 2", {"n": 1}),
        (f"{tmp_path}/e.txt", "e"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": \n', "a.jsonl, line 3: not valid JSON (Expecting value"),
        ("a.jsonl", "{}\n[1]\n", "a.jsonl, line 2: expected an object or a string, got list"),
        ("a.json", '[{},\n {"text" 1}]', "a.json, line 2: not valid JSON (Expecting ':' delimiter)"),
        ("a.json", "[{}, 7]", "a.json, row 2: expected an object or a string, got int"),
        ("a.parquet", "this is text", "a.parquet: cannot be read (Parquet magic bytes"),
        ("a.jsonl", "{}\n" + "[" * 100_000, "a.jsonl, line 2: nested too deeply; fix or remove it"),
        ("a.json", "1" * 5000, "a.json: cannot be read (a number has too many digits)"),
        ("a.csv", "text\na\n", "unsupported extension; supported: .jsonl, .json, .parquet, .txt"),
        ("a.txt", b"caf\xe9", "a.txt: not UTF-8 text (byte 3); convert it first"),
    ],
)
def test_a_broken_file_is_named_with_its_place(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as caught:
        rows_of(tmp_path / name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_look_local_and_hub_ids_do_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    paths = ["./a", "../a", "/a/b", "~/a", "gone.jsonl", "a/b.PARQUET", "here"]
    others = ["HuggingFaceH4/ultrachat_200k", "wikitext", "a/b.v1"]
    assert [name for name in paths + others if looks_local(name)] == paths


def test_what_parquet_cannot_read_is_named_with_its_row(tmp_path, monkeypatch):
    bad = pa.array([b"good", b"caf\xe9"], pa.binary()).cast(pa.string(), safe=False)
    parquet.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet, row 2: not UTF-8 text"):
        rows_of(tmp_path / "a.parquet")
    # only errors of pyarrow itself are blamed on a file
    for raised, seen in (
        (pa.ArrowNotImplementedError("no such\ncodec"), InputError),
        (KeyError("x"), KeyError),
    ):
        monkeypatch.setattr(parquet.ParquetFile, "read_row_group", Mock(side_effect=raised))
        with pytest.raises(seen, match=r"cannot be read \(no such codec\)" if seen is InputError else "x"):
            rows_of(tmp_path / "a.parquet")
