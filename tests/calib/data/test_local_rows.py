"""Every kind of local file gives its rows in order, or an error that names the place."""

import re
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyarrow import parquet

from calib.data.local_rows import looks_local, open_rows
from calib.errors import InputError


def located_rows(path):
    rows = open_rows(str(path))
    return [rows[i] for i in range(len(rows))]


def rows_of(path):
    return [row for _, row in located_rows(path)]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_text_and_json(tmp_path):
    for name, text, rows in (
        # U+2028 ends a line for str.splitlines, but not in JSON lines
        ("a.jsonl", '\ufeff{"text": "a\u2028b"}\n\n"b"\r\n{"n": 1}', [{"text": "a\u2028b"}, "b", {"n": 1}]),
        ("a.json", '[{"text": "a"},\n "b"]', [{"text": "a"}, "b"]),
        ("a.json", '{"text": "a"}', [{"text": "a"}]),
        ("a.json", '{"text": "a"}\n{"text": "b"}\n', [{"text": "a"}, {"text": "b"}]),
        ("a.txt", "one\n\ntwo\n", ["one\n\ntwo\n"]),
    ):
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


def test_a_broken_file_is_named_with_its_place(tmp_path):
    for name, text, message in (
        ("a.jsonl", '{"text": "a"}\n\n{"text": \n', "a.jsonl, line 3, column 10: not valid JSON (Exp"),
        ("a.json", '[{},\n {"text" 1}]', "a.json, line 2, column 10: not valid JSON (Expecting ':'"),
        ("a.json", '{\n "text": 1\n}\n}', "a.json, line 4, column 1: not valid JSON (Extra data); fix or "),
        ("a.json", "[{}]\nx", "a.json, line 2, column 1: not valid JSON (Extra data); fix or remove it"),
        ("a.json", "[{}, 7]", "a.json, row 2: expected an object or a string, got int"),
        ("a.parquet", "this is text", "a.parquet: cannot be read (Parquet magic bytes"),
        ("a.jsonl", "{}\n" + "[" * 100_000, "a.jsonl, line 2: nested too deeply; fix or remove it"),
        ("a.json", "1" * 5000, "a.json: cannot be read (a number has too many digits)"),
        ("a.csv", "text\na\n", "unsupported extension; supported: .jsonl, .json, .parquet, .txt"),
        ("a.txt", b"caf\xe9", "a.txt: not UTF-8 text (byte 3); convert it first"),
    ):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(InputError, match=re.escape(message)):
            rows_of(tmp_path / name)


def test_of_several_bad_lines_the_first_is_named_in_whatever_order_rows_are_read(tmp_path):
    rows = open_rows(str(write(tmp_path / "a.jsonl", "{}\n\n[]\n{]\n{}\n{")))
    for index in (4, 2, 1):
        with pytest.raises(InputError, match=r"a\.jsonl, line 3: expected an object or a string, got list"):
            rows[index]
    assert (rows[0][1], rows[3][1]) == ({}, {})


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
    for raised, seen in ((pa.ArrowNotImplementedError("no\ncodec"), InputError), (KeyError("x"), KeyError)):
        monkeypatch.setattr(parquet.ParquetFile, "read_row_group", Mock(side_effect=raised))
        with pytest.raises(seen, match=r"cannot be read \(no codec\)" if seen is InputError else "x"):
            rows_of(tmp_path / "a.parquet")
