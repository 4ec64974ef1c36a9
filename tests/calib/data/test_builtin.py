"""Built-in text: what each dataset is, and that its documents are long enough."""

import sysconfig
import unicodedata
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from calib.data import check_dataset, load_data
from calib.data.builtin import BUILTIN, LONG_CHARACTERS, builtin_rows
from calib.errors import InputError
from calib.recipe import DataRecipe

SCRIPTS = {"ARABIC", "CJK", "CYRILLIC", "DEVANAGARI", "HIRAGANA"}
JAPANESE = {"KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC"}  # besides


def texts(name, seq_len=256):
    return [row for _, row in builtin_rows(f"builtin:{name}", seq_len)]


def test_code_is_the_top_of_the_standard_library_in_order():
    pieces = texts("code", 1024)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = "\n\n".join(file.read_text(errors="replace") for file in files)
    joined = "\n\n".join(pieces)
    assert whole.startswith(joined)
    assert len(whole) - len(joined) < 1024 * 6 + 2
    assert min(map(len, pieces)) >= 1024 * 6 - 2


def test_a_python_without_its_sources_has_no_code(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InputError, match=rf"'{tmp_path}' has no .py file; use another dataset"):
        texts("code")


def test_a_chat_asks_about_a_topic_twice_and_gets_parts_of_it():
    chats = [row["messages"] for row in texts("chat")]
    assert len(chats) > 100
    for messages in chats:
        assert [m["role"] for m in messages] == ["user", "assistant"] * 2
        question, first, _, second = (m["content"] for m in messages)
        asked = question.split("about ")[1].split("?")[0]
        assert f"{first}\n\n{second}" in topics[asked]
    assert {m[0]["content"].split("about ")[1].split("?")[0] for m in chats} >= {"for", "with"}


def test_a_chat_goes_through_the_template(tokenizer):
    recipe = DataRecipe(dataset="builtin:chat", samples=4, seq_len=100_000)
    for ids in load_data(recipe, tokenizer, None).samples:
        assert tokenizer.decode(ids).startswith("<s><|user|>What does Python's reference say")
        assert tokenizer.decode(ids).count("<|user|>") == 2


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


def test_long_documents_have_text_for_four_times_the_usual_samples():
    pieces = texts("long")
    assert min(map(len, pieces)) >= LONG_CHARACTERS - 2 == 4 * 2048 * 6 - 2
    assert len(pieces) > 5
    (all_of_it,) = texts("long", 1_000_000)
    assert all_of_it == "\n\n".join(topics[name] for name in sorted(topics))


def test_names_of_datasets_are_checked_without_reading_them():
    for name in ("random", "self", *BUILTIN, "org/chat"):
        check_dataset(name)


def test_names_of_no_datasets_are_refused(tmp_path):
    for check in (check_dataset, lambda name: builtin_rows(name, 8)):
        with pytest.raises(InputError, match="no built-in dataset 'builtin:wiki'; built in: builtin:p"):
            check("builtin:wiki")
    with pytest.raises(InputError, match=r"no file or directory '\./gone\.txt'; give a \.jsonl, "):
        check_dataset("./gone.txt")
    with pytest.raises(InputError, match=r"has no \.jsonl, \.json, \.parquet, \.txt file directly in it"):
        check_dataset(str(tmp_path))
