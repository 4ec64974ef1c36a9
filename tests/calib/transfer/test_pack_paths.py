"""Where models and data lie is in no file of a pack."""

import json
from pathlib import Path

import pytest
from apply_cases import copy, edited, packed, report_of
from command_line import ran

from calib.transfer.hidden_paths import hide_paths


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def says_nothing_of(pack, *words):
    for file in pack.iterdir():
        content = file.read_bytes()
        assert not [word for word in words if word.encode() in content], file


@pytest.mark.parametrize(
    ("model_path", "data", "is_gone"),
    [
        ("secret place/tiny", "{}/secret place/rows.jsonl", False),
        ("acme/tiny", "./data//acme/rows.jsonl", False),
        ("acme/tiny", "data/acme/", True),
    ],
)
def test_where_things_lie_stays_at_home(model_path, data, is_gone, model, here, monkeypatch):
    file = here / data.format(here)
    file = file if file.suffix else file / "rows.jsonl"
    file.parent.mkdir(parents=True)
    words = " ".join(f"w{i}" for i in range(3, 30))
    file.write_text("\n".join(map(json.dumps, [*[{"text": words}] * 4, {"text": 1}])))
    copy(model, here / model_path)
    flags = ("--samples", "9", "--seq-len", "16", "--device", "cpu", "--dataset", data.format(here))
    ran("calibrate", model_path, "-o", "given", *flags)
    assert "9 samples were asked for" in str(report_of(Path("given"))["warnings"])
    assert "rows were skipped" in str(report_of(Path("given"))["warnings"])
    given = Path("given").absolute()
    if is_gone:
        (here / "elsewhere").mkdir()
        monkeypatch.chdir(here / "elsewhere")
    pack = packed(given, here / "pack")
    says_nothing_of(pack, "secret", model_path, "data/", str(here))
    report, card = report_of(pack), (pack / "README.md").read_text()
    assert report["dataset"]["source"] == report["recipe"]["data"]["dataset"] == Path(data).name
    assert report["model"] == "tiny"
    assert "# FP8 KV-cache scales for tiny\n" in card
    row = "rows.jsonl, line 5: " if is_gone else "(such as rows.jsonl, line 5: "
    assert row in card
    assert any(row in warning for warning in report["warnings"])


def test_paths_of_an_evaluation_and_of_merged_data_but_not_of_the_hub(measured, here):
    for directory in ("owner/name", "held/out"):
        (here / directory).mkdir(parents=True)
    (here / "held" / "out" / "rows.jsonl").touch()
    hub = {"model": "owner/name", "revision": "0123456789" * 4}
    source = "HuggingFaceH4/ultrachat_200k [train_sft] + acme/first + acme/second.txt"
    report = report_of(measured)
    report["recipe"]["evaluation"] |= {
        "dataset": "held/out/rows.jsonl",
        "tasks": ["gsm8k", "acme/tasks/sums.yaml"],
        "also": ["held/out", "HuggingFaceH4/ultrachat_200k", "builtin:python-docs"],
    }
    changes = {"recipe": report["recipe"], "dataset": report["dataset"] | {"source": source}}
    changes |= {"hub": hub, "model": "owner/name"}
    warnings = ["nothing in acme/first, row 1: none", "see https://huggingface.co/a/b and </s>"]
    pack = packed(edited(measured, here / "given", warnings=warnings, **changes), here / "pack")
    says_nothing_of(pack, "acme", "held/")
    found = report_of(pack)
    assert found["dataset"]["source"] == "HuggingFaceH4/ultrachat_200k [train_sft] + first + second.txt"
    asked = found["recipe"]["evaluation"]
    assert asked["dataset"] == "rows.jsonl"
    assert asked["tasks"] == ["gsm8k", "sums.yaml"]
    assert asked["also"] == ["out", "HuggingFaceH4/ultrachat_200k", "builtin:python-docs"]
    assert found["model"] == "owner/name"
    assert found["warnings"] == ["nothing in first, row 1: none", warnings[1]]


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
def test_paths_within_a_text(text, expected, monkeypatch):
    assert hide_paths([{"x": text}], ["my own/data"]) == [{"x": expected}]
    monkeypatch.setenv("HOME", "/home/my own")  # which is known by both its spellings
    assert hide_paths("of /home/my own/data/x.txt, row 1", ["~/data/x.txt"]) == "of x.txt, row 1"
