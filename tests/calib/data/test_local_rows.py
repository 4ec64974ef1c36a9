"""Every kind of local file gives its rows in order, or an error that names the place."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from calib.data.local_rows import looks_local, open_rows
from calib.errors import InputError


def rows_of(path):
    rows = open_rows(str(path))
    return [rows[i][1] for i in range(len(rows))]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_jsonl_skips_empty_lines_and_splits_only_at_newlines(tmp_path):
    # U+2028 ends a line for str.splitlines, but not in JSON lines
    lines = ["\ufeff" + json.dumps({"text": "a\u2028b"}, ensure_ascii=False), "", '"bare"\r', '{"n": 1}']
    rows = [{"text": "a\u2028b"}, "bare", {"n": 1}]
    assert rows_of(write(tmp_path / "a.jsonl", "\n".join(lines))) == rows


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('[{"text": "a"},\n "b"]', [{"text": "a"}, "b"]),
        ('{"text": "a"}', [{"text": "a"}]),
        ('{"text": "a"}\n{"text": "b"}\n', [{"text": "a"}, {"text": "b"}]),
    ],
)
def test_json(tmp_path, text, rows):
    assert rows_of(write(tmp_path / "a.json", text)) == rows


@pytest.mark.parametrize("row_group_size", [1, 7, 40])
def test_parquet_rows_across_more_row_groups_than_are_kept(tmp_path, row_group_size):
    rows = [{"text": f"t{i}", "n": i} for i in range(40)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=row_group_size)
    assert rows_of(tmp_path / "a.parquet") == rows


def test_a_text_file_is_one_document(tmp_path):
    assert rows_of(write(tmp_path / "a.txt", "one\n\ntwo\n")) == ["one\n\ntwo\n"]


def test_a_directory_is_its_readable_files_by_name(tmp_path):
    write(tmp_path / "b.txt", "B")
    write(tmp_path / "a.jsonl", '"a1"\n"a2"\n')
    write(tmp_path / "C.JSON", '["c"]')
    write(tmp_path / "empty.jsonl", "")
    parquet.ParquetWriter(tmp_path / "empty.parquet", pa.schema({"text": pa.string()})).close()
    write(tmp_path / "README.md", "not data")
    (tmp_path / "sub.txt").mkdir()
    assert rows_of(tmp_path) == ["c", "a1", "a2", "B"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": \n', "a.jsonl, line 3: not valid JSON (Expecting value"),
        ("a.jsonl", "{}\n[1]\n", "a.jsonl, line 2: expected an object or a string, got list"),
        ("a.json", '[{},\n {"text" 1}]', "a.json, line 2: not valid JSON (Expecting ':' delimiter)"),
        ("a.json", "[{}, 7]", "a.json, row 2: expected an object or a string, got int"),
        ("a.parquet", "this is text", "a.parquet: cannot be read (Parquet magic bytes"),
        ("a.jsonl", "{}\n" + "[" * 100_000, "a.jsonl, line 2: nested too deeply; fix or remove it"),
        ("a.jsonl", '{}\n{"n": ' + "1" * 5000 + "}", "line 2: cannot be read (a number has too many digits)"),
        ("a.json", "[" * 100_000, "a.json: nested too deeply; fix or remove it"),
        ("a.json", "1" * 5000, "a.json: cannot be read (a number has too many digits)"),
        ("a.csv", "text\na\n", "unsupported extension; supported: .jsonl, .json, .parquet, .txt"),
    ],
)
def test_a_broken_file_is_named_with_its_place(tmp_path, name, text, message):
    with pytest.raises(InputError) as caught:
        rows_of(write(tmp_path / name, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(InputError, match=r"a\.txt: not UTF-8 text \(byte 3\); convert it first"):
        rows_of(tmp_path / "a.txt")


def test_paths_look_local_and_hub_ids_do_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    paths = ["./a", "../a", "/a/b", "~/a", "gone.jsonl", "a/b.PARQUET", "here"]
    assert [name for name in paths if not looks_local(name)] == []
    assert [
        name for name in ("HuggingFaceH4/ultrachat_200k", "wikitext", "a/b.v1") if looks_local(name)
    ] == []


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.txt", "home")
    assert rows_of("~/a.txt") == ["home"]


def test_every_row_says_where_it_is(tmp_path):
    write(tmp_path / "a.jsonl", '"a1"\n\n"a2"\n')
    write(tmp_path / "b.json", '["b1", "b2"]')
    parquet.write_table(pa.Table.from_pylist([{"n": 1}] * 3), tmp_path / "c.parquet")
    write(tmp_path / "d.txt", "d")
    rows = open_rows(str(tmp_path))
    assert [rows[i][0].removeprefix(f"{tmp_path}/") for i in range(len(rows))] == [
        "a.jsonl, line 1",
        "a.jsonl, line 3",
        "b.json, row 1",
        "b.json, row 2",
        *(f"c.parquet, row {n}" for n in (1, 2, 3)),
        "d.txt",
    ]


def test_parquet_text_that_is_no_utf_8_is_named_with_its_row(tmp_path):
    bad = pa.array([b"good", b"caf\xe9"], pa.binary()).cast(pa.string(), safe=False)
    parquet.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet, row 2: not UTF-8 text"):
        rows_of(tmp_path / "a.parquet")


class OtherError(Exception):
    """An error of a module whose name merely begins like pyarrow's."""

    __module__ = "pyarrow_helpers"


@pytest.mark.parametrize(
    ("raised", "seen", "message"),
    [
        (pa.ArrowNotImplementedError("no such\ncodec"), InputError, r"cannot be read \(no such codec\)"),
        (OtherError("a mistake of ours"), OtherError, "a mistake of ours"),
    ],
)  # fmt: skip
def test_only_errors_of_pyarrow_itself_are_blamed_on_a_file(raised, seen, message, tmp_path, monkeypatch):
    def fail(*args):
        raise raised

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", fail)
    parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(seen, match=message):
        rows_of(tmp_path / "a.parquet")
