"""Long documents are consecutive samples: nothing is lost, nothing doubled, spread evenly."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from calib.data import load_data
from calib.data.samples import SMALLEST_PIECE, Pieces, encode
from calib.recipe import DataRecipe

TEXT = " ".join(f"{i:03}" for i in range(250))[:997]
QUESTION, ANSWER = "<|user|>", "<|assistant|>"


@pytest.fixture
def loaded(tmp_path, tokenizer):
    """Samples of rows in a file, and what is decoded of them without BOS."""

    def loaded(*rows, tokenizer=tokenizer, samples=9, seq_len=64):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = DataRecipe(dataset=str(tmp_path / "a.jsonl"), samples=samples, seq_len=seq_len)
        data = load_data(recipe, tokenizer, None)
        return data, [tokenizer.decode(ids).removeprefix("<s>") for ids in data.samples]

    return loaded


def test_all_of_a_long_document_is_read(loaded, tokenizer):
    data, texts = loaded(TEXT, samples=11, seq_len=100)
    assert "".join(sorted(texts, key=TEXT.index)) == TEXT[: 10 * 99]
    # evenly, however few are asked for: by the bits of their numbers in reverse
    assert [TEXT.index(text) // 99 for text in texts] == [0, 8, 4, 2, 6, 1, 9, 5, 3, 7]
    assert [(ids[0], len(ids)) for ids in data.samples] == [(tokenizer.bos_token_id, 100)] * 10
    assert (data.documents, data.num_tokens, data.unread) == (1, 1000, 7)
    said = f"11 samples were asked for and dataset '{data.source}' has 10; all 10 are used"
    assert data.warnings == (said,)


def test_lengths_about_that_of_a_sample(loaded):
    for characters, lengths in (
        (63, [64]),  # and the one in front
        (63 + 7, [64]),
        (63 + 8, [64, 9]),
        (126, [64, 64]),
        (127, [64, 64]),
    ):
        data, _ = loaded(TEXT[:characters])
        assert [len(ids) for ids in data.samples] == lengths
        assert data.unread == characters - sum(length - 1 for length in lengths)


def test_documents_enough_give_their_beginnings_alone_and_fewer_share_samples_by_length(loaded):
    data, texts = loaded(*(f"{i}{TEXT}" for i in range(9)))
    assert {*texts} == {f"{i}{TEXT[:62]}" for i in range(9)}
    assert (data.documents, data.unread, data.warnings) == (9, 9 * (998 - 63), ())
    rows = ["short", TEXT, TEXT[::-1] * 3]
    data, texts = loaded(*rows, samples=23)
    assert [sum(text in row for text in texts) for row in rows] == [1, 1 + 5, 1 + 15]
    assert [piece.document for piece in data.pieces[:3]] == [0, 1, 2]
    assert data.unread == 5 + 997 + 3 * 997 + 3 - sum(len(ids) for ids in data.samples) + 20
    assert data.line.startswith("documents: 3, samples: 23; ")


def chat_of(*lengths):
    texts = (f"{i:02}{TEXT[:length]}"[:length] for i, length in enumerate(lengths))
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def rendered(messages):
    return "".join(f"<|{message['role']}|>{message['content']}" for message in messages)


def test_a_long_chat_keeps_turns_whole(loaded, tokenizer):
    messages = chat_of(*(3 + 7 * i % 40 for i in range(40)))
    data, texts = loaded({"messages": messages}, samples=40)
    whole = rendered(messages)
    texts.sort(key=whole.index)
    assert "".join(texts) == whole
    for text, following in pairwise(texts):
        assert following.startswith((QUESTION, ANSWER))
        # <s> and one turn more would be too much
        turn = following[: following.find("<|", 1) if "<|" in following[1:] else None]
        assert len(encode(text + turn, tokenizer)) > 64
    assert all(ids[0] == tokenizer.bos_token_id and len(ids) <= 64 for ids in data.samples)
    assert (data.documents, data.unread) == (1, 0)


def test_a_turn_that_fits_no_sample_is_cut_as_text(loaded):
    messages = chat_of(20, 200, 30, 10)
    _, texts = loaded({"messages": messages})
    texts.sort(key=rendered(messages).index)
    # beside <s>: a mark is one token, and 21 and 42 of 201 are 63, then 63, 63 and 33 with no 31 behind
    marked = [text.replace(QUESTION, "?").replace(ANSWER, "!") for text in texts]
    assert [len(text) for text in marked] == [63, 63, 63, 33, 42]
    assert marked[-1].startswith("?02")


def test_what_a_beginning_alone_holds_comes_last(loaded):
    """A run with fewer samples has read it: what is held out from that run comes before."""
    turns = ({"role": ("user", "assistant")[i % 2], "content": TEXT[50 * i : 50 * i + 50]} for i in range(18))
    rows = [{"messages": [next(turns) for _ in range(6)]} for _ in range(3)]
    few, _ = loaded(*rows, samples=3)
    assert [len(ids) for ids in few.samples] == [64] * 3  # no turn is kept whole
    many, _ = loaded(*rows, samples=99)
    ends = {tuple(ids[-10:]) for ids in few.samples}
    known = [any(tuple(ids[at : at + 10]) in ends for at in range(len(ids))) for ids in many.samples[3:]]
    assert known == [False] * 12 + [True] * 3


def test_a_template_that_tells_no_turns_is_cut_as_text(loaded, byte_tokenizer):
    # all turns before the last are written in another way
    written = "{{ '<|' + m.role + '|>' + (m.content if loop.last else m.content[1:]) }}"
    tokenizer = byte_tokenizer(chat_template="{% for m in messages %}" + written + "{% endfor %}")
    data, _ = loaded({"messages": chat_of(40, 40, 40)}, tokenizer=tokenizer, seq_len=50)
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
    documents = [[*opening, *range(1000 * i, 1000 * i + size)] for i, size in enumerate(lengths[:limit], 1)]

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
