"""The whole way from a recipe to fingerprinted samples: one source, in an order of the seed alone."""

import hashlib
import json
import random
import sysconfig
import unicodedata
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import pytest

from calib.data import CalibrationData, check_dataset, load_data
from calib.data.builtin import BUILTIN, LONG_CHARACTERS, builtin_rows
from calib.data.loading import open_source
from calib.data.samples import Piece
from calib.errors import InputError
from calib.recipe import DataRecipe

DOCS = "builtin:python-docs"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SCRIPTS = {"ARABIC", "CJK", "CYRILLIC", "DEVANAGARI", "HIRAGANA"}
JAPANESE = {"KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC"}  # besides


def fingerprint(*samples):
    return CalibrationData([Piece(0, len(ids), ids) for ids in samples], "text").fingerprint


def test_a_local_file_becomes_samples_with_source_and_warnings(tokenizer, tmp_path):
    mixed = tmp_path / "mixed.jsonl"
    rows = [{"messages": CHAT}, {"text": "plain"}, {"text": " "}]
    mixed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_data(DataRecipe(dataset=str(mixed), split="x", samples=9), tokenizer, None)
    texts = {tokenizer.decode(ids) for ids in loaded.samples}
    assert texts == {"<s><|user|>hi<|assistant|>yo", "<s>plain"}
    assert (loaded.num_tokens, loaded.source) == (7 + 6, str(mixed))
    assert loaded.fingerprint == fingerprint(*loaded.samples)
    assert loaded.warnings == (
        f"data.split 'x' is ignored: dataset '{mixed}' has none",
        f"9 samples were asked for and dataset '{mixed}' has 2; all 2 are used",
    )


def test_python_docs_fill_64_samples_of_512_tokens(tokenizer):
    settings = {"config": "c", "split": "s", "column": "x"}
    recipe = DataRecipe(dataset=DOCS, samples=64, seq_len=512, **settings)
    loaded = load_data(recipe, tokenizer, None)
    assert [len(sample) for sample in loaded.samples] == [512] * 64
    said = tuple(f"data.{k} '{v}' is ignored: dataset '{DOCS}' has none" for k, v in settings.items())
    assert (loaded.source, loaded.warnings) == (DOCS, said)
    assert load_data(recipe, tokenizer, None) == loaded
    other = load_data(recipe.model_copy(update={"seed": 1}), tokenizer, None)
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


def test_local_rows_are_shuffled_by_the_seed_and_files_that_are_not_read_are_a_warning(tmp_path):
    ten_lines = tmp_path / "ten.jsonl"
    ten_lines.write_text("".join(f'"line {i}"\n' for i in range(10)))
    order = list(range(10))
    random.Random(7).shuffle(order)
    name, rows, warnings = open_source(DataRecipe(dataset=str(ten_lines), seed=7, column="x"))
    assert (name, warnings) == (str(ten_lines), ())
    assert list(rows) == [(f"{ten_lines}, line {i + 1}", f"line {i}") for i in order]
    for name in (".DS_Store", ".gitattributes"):
        (tmp_path / name).touch()
    assert open_source(DataRecipe(dataset=str(tmp_path))).warnings == ()
    for name in ("b.csv", *"cdefghij"):
        (tmp_path / name).touch()
    assert open_source(DataRecipe(dataset=str(tmp_path))).warnings == (
        f"dataset '{tmp_path}': not read are b.csv, c, d, e, f, g, ... (9 in all); "
        "supported: .jsonl, .json, .parquet, .txt, directly in it",
    )


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


def texts(name, seq_len=256):
    return [row for _, row in builtin_rows(f"builtin:{name}", seq_len)]


def test_prose_and_code_are_the_whole_in_order_in_pieces_long_enough(monkeypatch, tmp_path):
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = "\n\n".join(file.read_text(errors="replace") for file in files)
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    assert LONG_CHARACTERS == 4 * 2048 * 6
    for name, whole, characters in (
        ("code", code, 256 * 6),
        ("python-docs", prose, 256 * 6),
        ("long", prose, LONG_CHARACTERS),
    ):
        pieces = texts(name)
        assert whole.startswith("\n\n".join(pieces))
        assert len(whole) - len("\n\n".join(pieces)) < characters + 2
        assert min(map(len, pieces)) >= characters - 2
        assert len(pieces) > 5
    assert texts("long", 1_000_000) == [prose]
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InputError, match=rf"'{tmp_path}' has no .py file; use another dataset"):
        texts("code")


def test_a_chat_asks_about_a_topic_twice_and_gets_parts_of_it():
    chats = [row["messages"] for row in texts("chat")]
    assert len(chats) > 100
    asked = set()
    for messages in chats:
        assert [m["role"] for m in messages] == ["user", "assistant"] * 2
        question, first, _, second = (m["content"] for m in messages)
        asked.add(topic := question.split("about ")[1].split("?")[0])
        assert f"{first}\n\n{second}" in topics[topic]
    assert asked >= {"for", "with"}


def test_every_script_is_there_in_pieces_of_its_own():
    found = Counter()
    for piece in texts("script"):
        kinds = Counter(unicodedata.name(c, "").split()[0] for c in piece if c.isalpha())
        # Japanese is written in three scripts
        kind = "HIRAGANA" if kinds["HIRAGANA"] else kinds.most_common(1)[0][0]
        assert kinds["LATIN"] == 0
        assert sum(n for k, n in kinds.items() if k in SCRIPTS | JAPANESE) == kinds.total()
        found[kind] += len(piece)
    assert set(found) == SCRIPTS
    assert min(found.values()) > 2000


def test_names_of_datasets_are_checked_without_reading_them(tmp_path):
    for name in ("random", "self", *BUILTIN, "org/chat"):
        check_dataset(name)
    for check in (check_dataset, lambda name: builtin_rows(name, 8)):
        with pytest.raises(InputError, match="no built-in dataset 'builtin:wiki'; built in: builtin:p"):
            check("builtin:wiki")
    with pytest.raises(InputError, match=r"no file or directory '\./gone\.txt'; give a \.jsonl, "):
        check_dataset("./gone.txt")
    with pytest.raises(InputError, match=r"has no \.jsonl, \.json, \.parquet, \.txt file directly in it"):
        check_dataset(str(tmp_path))
