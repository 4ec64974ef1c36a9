"""Where models and data lie is in no file of a pack."""

import json

import pytest
from apply_cases import copy, edited, packed, report_of
from command_line import ran

from calib.transfer.hidden_paths import hide_paths

FLAGS = ("--samples", "4", "--seq-len", "16", "--device", "cpu")


def rows(path, *more):
    """A data file, `more` rows of which hold no text."""
    path.parent.mkdir(parents=True)
    words = " ".join(f"w{i}" for i in range(3, 30))
    texts = [{"text": words}] * 4 + [*more]
    path.write_text("\n".join(map(json.dumps, texts)))
    return path


def says_nothing_of(pack, *words):
    for file in pack.iterdir():
        content = file.read_bytes()
        assert not [word for word in words if word.encode() in content], file


def calibrated_on(data, model, out, *flags):
    """A calibration whose warnings name the file of a row without text."""
    ran("calibrate", model, "-o", out, *FLAGS, "--samples", "9", "--dataset", data, *flags)
    assert any("rows were skipped" in warning for warning in report_of(out)["warnings"])
    assert any("9 samples were asked for" in warning for warning in report_of(out)["warnings"])
    return out


def test_where_things_lie_stays_at_home(model, tmp_path):
    home = tmp_path / "secret place"
    data = rows(home / "rows.jsonl", {"text": 1})
    given = calibrated_on(data, copy(model, home / "tiny"), tmp_path / "given")
    assert "secret place" in (given / "fp8kv_calibration.json").read_text()
    pack = packed(given, tmp_path / "pack")
    says_nothing_of(pack, "secret", str(tmp_path))
    report, card = report_of(pack), (pack / "README.md").read_text()
    assert report["dataset"]["source"] == report["recipe"]["data"]["dataset"] == "rows.jsonl"
    assert report["model"] == "tiny"
    assert any("(such as rows.jsonl, line 5: " in warning for warning in report["warnings"])
    assert "(such as rows.jsonl, line 5: " in card


@pytest.mark.parametrize(("data", "is_gone"), [("./data//acme/rows.jsonl", False), ("data/acme/", True)])
def test_paths_from_here(data, is_gone, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "data" / "acme" / "rows.jsonl", {"text": 1})
    copy(model, tmp_path / "models" / "ckpt")
    given = calibrated_on(data, "models/ckpt", tmp_path / "given")
    if is_gone:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
    pack = packed(given, tmp_path / "pack")
    says_nothing_of(pack, "models/ckpt", "data/", str(tmp_path))
    assert report_of(pack)["model"] == "ckpt"
    assert "# FP8 KV-cache scales for ckpt\n" in (pack / "README.md").read_text()


def test_paths_of_an_evaluation_and_of_merged_data(measured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "held" / "out" / "rows.jsonl")
    source = "HuggingFaceH4/ultrachat_200k [train_sft] + acme/first + acme/second.txt"
    report = report_of(measured)
    report["recipe"]["evaluation"] |= {
        "dataset": "held/out/rows.jsonl",
        "tasks": ["gsm8k", "acme/tasks/sums.yaml"],
        "also": ["held/out", "HuggingFaceH4/ultrachat_200k", "builtin:python-docs"],
    }
    changes = {"recipe": report["recipe"], "dataset": report["dataset"] | {"source": source}}
    warnings = ["nothing in acme/first, row 1: none", "see https://huggingface.co/a/b and </s>"]
    pack = packed(edited(measured, tmp_path / "given", warnings=warnings, **changes), tmp_path / "pack")
    says_nothing_of(pack, "acme", "held/")
    found = report_of(pack)
    assert found["dataset"]["source"] == "HuggingFaceH4/ultrachat_200k [train_sft] + first + second.txt"
    asked = found["recipe"]["evaluation"]
    assert asked["dataset"] == "rows.jsonl"
    assert asked["tasks"] == ["gsm8k", "sums.yaml"]
    assert asked["also"] == ["out", "HuggingFaceH4/ultrachat_200k", "builtin:python-docs"]
    assert found["warnings"] == ["nothing in first, row 1: none", warnings[1]]


def test_names_on_the_hub_stay(measured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    hub = {"model": "owner/name", "revision": "0123456789" * 4}
    given = edited(measured, tmp_path / "given", hub=hub, model="owner/name")
    assert report_of(packed(given, tmp_path / "pack"))["model"] == "owner/name"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(such as /home/me/rows.jsonl, line 5: no)", "(such as rows.jsonl, line 5: no)"),
        ("in ../a/b/x.txt and ~/c/y.txt", "in x.txt and y.txt"),
        ("'/home/my own/x.txt' is large", "'x.txt' is large"),
        ("K/V of 1 / 2 layers, 3/4 of ~5 %", "K/V of 1 / 2 layers, 3/4 of ~5 %"),
        ("see https://huggingface.co/a/b", "see https://huggingface.co/a/b"),
        ("file:///home/me/x", "file:x"),
        ("my own/data/x.txt", "data/x.txt"),
        ("my own/data-2", "my own/data-2"),
    ],
)
def test_paths_within_a_text(text, expected):
    assert hide_paths([{"x": text}], ["my own/data"]) == [{"x": expected}]


def test_a_home_is_known_by_both_its_spellings(monkeypatch):
    monkeypatch.setenv("HOME", "/home/my own")
    assert hide_paths("of /home/my own/data/x.txt, row 1", ["~/data/x.txt"]) == "of x.txt, row 1"
