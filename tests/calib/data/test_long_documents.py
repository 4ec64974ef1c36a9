"""Long documents are consecutive samples: nothing is lost, nothing doubled, spread evenly."""

import json
import time
from itertools import pairwise
from pydoc_data.topics import topics

import datasets
import pyarrow
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import parquet

from calib.data import load_data
from calib.data.samples import SMALLEST_PIECE, Pieces, encode
from calib.models.sources import builtin_model
from calib.recipe import DataRecipe

TEXT = " ".join(f"{i:03}" for i in range(250))[:997]
QUESTION, ANSWER = "<|user|>", "<|assistant|>"


def book_of(size):
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return (text * (1 + size // len(text)))[:size]


def loaded(path, tokenizer, **settings):
    return load_data(DataRecipe(dataset=str(path), **settings), tokenizer, None)


def write(path, text):
    """Write `text` as the only document, in the format that the suffix names."""
    if path.suffix == "":
        path.mkdir()
        path = path / "a.txt"
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": [text]}), path)
    else:
        row = {"text": text}
        forms = {".txt": text, ".json": json.dumps([row]), ".jsonl": json.dumps(row)}
        path.write_text(forms[path.suffix])


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.parquet", "folder"])
def test_every_source_gives_all_of_a_long_document(tmp_path, tokenizer, name):
    write(tmp_path / name, TEXT)
    data = loaded(tmp_path / name, tokenizer, seq_len=100, samples=11)
    texts = [tokenizer.decode(ids) for ids in data.samples]
    assert all(text.startswith("<s>") and text.count("<s>") == 1 for text in texts)
    in_order = sorted((text.removeprefix("<s>") for text in texts), key=TEXT.index)
    assert "".join(in_order) == TEXT[: 10 * 99]
    assert [len(ids) for ids in data.samples] == [100] * 10
    assert (data.documents, data.num_tokens, data.unread) == (1, 1000, 7)
    assert data.warnings == (
        f"11 samples were asked for and dataset '{tmp_path / name}' has 10; all 10 are used",
    )


def test_rows_of_the_hub_are_read_no_further_than_needed(monkeypatch, tokenizer):
    count, read = 5000, []

    def rows():
        for number in range(count):
            read.append(number)
            yield {"text": f"{number}{TEXT}"}

    def load(*_, **__):
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *args: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("calib.data.hub_rows.SHUFFLE_BUFFER", 10)
    few = load_data(DataRecipe(dataset="o/d", samples=4, seq_len=100), tokenizer, None)
    assert (len(few.samples), few.documents) == (4, 4)
    assert len(read) < 20
    count = 2
    both = load_data(DataRecipe(dataset="o/d", samples=18, seq_len=100), tokenizer, None)
    assert (len(both.samples), both.documents) == (18, 2)
    assert {ids[0] for ids in both.samples} == {tokenizer.bos_token_id}


@pytest.mark.parametrize(
    ("characters", "lengths"),
    [
        (63, [64]),  # and the one in front
        (64, [64]),  # a rest of one token is left
        (63 + 7, [64]),
        (63 + 8, [64, 9]),
        (126, [64, 64]),
        (127, [64, 64]),
    ],
)
def test_lengths_about_that_of_a_sample(tmp_path, tokenizer, characters, lengths):
    (tmp_path / "a.txt").write_text(TEXT[:characters])
    data = loaded(tmp_path / "a.txt", tokenizer, seq_len=64)
    assert [len(ids) for ids in data.samples] == lengths
    assert data.unread == characters - sum(length - 1 for length in lengths)


def test_documents_enough_give_their_beginnings_alone(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(f"{i}{TEXT}") + "\n" for i in range(9)))
    data = loaded(tmp_path / "a.jsonl", tokenizer, seq_len=64, samples=9)
    texts = {tokenizer.decode(ids) for ids in data.samples}
    assert texts == {f"<s>{i}{TEXT[:62]}" for i in range(9)}
    assert (data.documents, data.unread) == (9, 9 * (998 - 63))
    assert data.warnings == ()


def test_documents_share_samples_by_their_length(tmp_path, tokenizer):
    rows = ["short", TEXT, TEXT[::-1] * 3]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = loaded(tmp_path / "a.jsonl", tokenizer, seq_len=64, samples=23)
    texts = [tokenizer.decode(ids).removeprefix("<s>") for ids in data.samples]
    counts = [sum(text in row for text in texts) for row in rows]
    assert counts == [1, 1 + 5, 1 + 15]
    assert [piece.document for piece in data.pieces[:3]] == [0, 1, 2]
    assert data.unread == 5 + 997 + 3 * 997 + 3 - sum(len(ids) for ids in data.samples) + 20
    assert data.line.startswith("documents: 3, samples: 23; ")


def test_a_book_is_read_from_the_beginning_to_the_end(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(builtin_model("builtin:smollm2"))
    book = book_of(1_000_000)
    (tmp_path / "book.txt").write_text(book)
    whole = encode(book, tokenizer)
    began = time.perf_counter()
    data = loaded(tmp_path / "book.txt", tokenizer, samples=10_000, seq_len=256)
    assert time.perf_counter() - began < 60  # 2 s where nothing else runs
    places = range(0, len(whole), 256)
    assert len(data.samples) == sum(len(whole) - at >= 256 // SMALLEST_PIECE for at in places)
    assert data.num_tokens + data.unread == len(whole)
    expected = {tuple(whole[at : at + 256]) for at in places}
    assert {tuple(ids) for ids in data.samples} <= expected
    fewer = loaded(tmp_path / "book.txt", tokenizer, samples=12, seq_len=256)
    assert fewer.samples == data.samples[:12]


def chat_of(*lengths):
    roles = ("user", "assistant")
    texts = (f"{i:02}{TEXT[:length]}"[:length] for i, length in enumerate(lengths))
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def rendered(messages):
    marks = {"user": QUESTION, "assistant": ANSWER}
    return [marks[message["role"]] + message["content"] for message in messages]


def test_a_long_chat_keeps_turns_whole(tmp_path, tokenizer):
    messages = chat_of(*(3 + 7 * i % 40 for i in range(40)))
    turns = rendered(messages)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    data = loaded(tmp_path / "a.jsonl", tokenizer, samples=40, seq_len=64)
    texts = [tokenizer.decode(ids).removeprefix("<s>") for ids in data.samples]
    texts.sort(key="".join(turns).index)
    assert "".join(texts) == "".join(turns)
    ends = {len("".join(turns[:i])) for i in range(41)}
    at = 0
    for text, following in pairwise([*texts, ""]):
        at += len(text)
        assert at in ends
        turn = following[: min(end for end in ends if end > at) - at] if following else ""
        # <s> and one turn more would be too much
        assert not turn or len(encode(text + turn, tokenizer)) > 64
    assert all(ids[0] == tokenizer.bos_token_id and len(ids) <= 64 for ids in data.samples)
    assert (data.documents, data.unread) == (1, 0)


def test_a_turn_that_fits_no_sample_is_cut_as_text(tmp_path, tokenizer):
    messages = chat_of(20, 200, 30, 10)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    data = loaded(tmp_path / "a.jsonl", tokenizer, samples=9, seq_len=64)
    in_order = sorted(
        data.samples,
        key=lambda ids: "".join(rendered(messages)).index(tokenizer.decode(ids).removeprefix("<s>")),
    )
    # <s> and a mark are one token each: 21 and 42 of 201, then 63, 63 and 33 with no 31 behind
    assert [len(ids) for ids in in_order] == [64, 64, 64, 34, 43]
    assert tokenizer.decode(in_order[-1]).startswith(f"<s>{QUESTION}02")


def test_long_chats_enough_are_cut_as_ever(tmp_path, tokenizer):
    chats = [chat_of(30, 30, 30 + i) for i in range(4)]
    rows = (json.dumps({"messages": chat}) + "\n" for chat in chats)
    (tmp_path / "a.jsonl").write_text("".join(rows))
    data = loaded(tmp_path / "a.jsonl", tokenizer, samples=4, seq_len=64)
    assert [len(ids) for ids in data.samples] == [64] * 4


def test_what_a_beginning_alone_holds_comes_last(tmp_path, tokenizer):
    """A run with fewer samples has read it: what is held out from that run comes before."""
    turns = ({"role": ("user", "assistant")[i % 2], "content": TEXT[50 * i : 50 * i + 50]} for i in range(18))
    rows = (json.dumps({"messages": [next(turns) for _ in range(6)]}) + "\n" for _ in range(3))
    (tmp_path / "a.jsonl").write_text("".join(rows))
    few = loaded(tmp_path / "a.jsonl", tokenizer, samples=3, seq_len=64)
    many = loaded(tmp_path / "a.jsonl", tokenizer, samples=99, seq_len=64)
    ends = {tuple(ids[-10:]) for ids in few.samples}
    known = [any(tuple(ids[at : at + 10]) in ends for at in range(len(ids))) for ids in many.samples[3:]]
    assert known == [False] * 12 + [True] * 3


OTHERWISE = (  # a template that writes all turns before the last in another way
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{{ m.content if loop.last else m.content[1:] }}{% endfor %}"
)


def test_a_template_that_tells_no_turns_is_cut_as_text(tmp_path, byte_tokenizer):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat_of(40, 40, 40)}))
    tokenizer = byte_tokenizer(chat_template=OTHERWISE)
    data = loaded(tmp_path / "a.jsonl", tokenizer, samples=9, seq_len=50)
    assert [len(ids) for ids in data.samples] == [50, 21, 50]  # the last third comes second
    assert data.unread == 0


@example([420], 100, 4, 0, [60, 150, 240, 330])
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.integers(2, 60),
    st.integers(1, 80),
    st.integers(0, 3),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_pieces_are_disjoint_and_a_larger_limit_only_adds(lengths, seq_len, limit, opening, turns):
    opening = list(range(-opening, 0))
    documents = [
        [*opening, *range(1000 * i, 1000 * i + length)] for i, length in enumerate(lengths[:limit], 1)
    ]

    def pieces_of(limit):
        pieces = Pieces(limit, seq_len, opening)
        for ids in documents:
            pieces.cut(pieces.add(ids), ids, sorted(turns))
        return pieces.all()

    some, every = pieces_of(limit), pieces_of(10_000)
    assert some == every[:limit]
    own = [token for piece in every for token in piece.ids if token >= 0]
    assert len(own) == len(set(own))
    assert max(len(piece.ids) for piece in every) <= seq_len
    kept = opening if len(opening) < seq_len else []
    assert all(piece.ids[: len(kept)] == kept for piece in every)
    read = sum(piece.tokens for piece in every)
    assert 0 <= sum(map(len, documents)) - read <= len(documents) * max(0, seq_len // SMALLEST_PIECE - 1)


@given(st.integers(1, 3000), st.integers(1, 200))
def test_pieces_are_spread_evenly(count, limit):
    pieces = Pieces(limit, 2, [])
    ids = range(2 * count)
    pieces.cut(pieces.add(ids), ids)
    places = sorted(piece.ids[0] // 2 for piece in pieces.all())
    assert places == sorted(set(places))
    assert len(places) == min(limit, count)
    assert places[0] == 0
    gaps = [b - a for a, b in pairwise([*places, count])]
    assert max(gaps) <= max(1, 2 * count / len(places))
