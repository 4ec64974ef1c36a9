"""Texts and chats of rows are found; samples are what the model would read, consecutive in long documents."""

import json
import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from calib.data import load_data
from calib.data.samples import (
    MAX_REFUSALS,
    SMALLEST_PIECE,
    Pieces,
    SkippedRows,
    count_words,
    encode,
    find_document,
    tokenize_rows,
)
from calib.errors import InputError
from calib.recipe import DataRecipe

NO_COLUMN = "no column 'c' in the dataset; columns: a, b; choose one with `--set data.column=NAME`"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SYSTEM = [{"role": "system", "content": "be brief"}, *CHAT]
SHAREGPT = [{"from": who, "value": who[0]} for who in ("system", "human", "gpt", "tool")]
ROLES = [("system", "s"), ("user", "h"), ("assistant", "g"), ("tool", "t")]
# Arrow fills absent keys with None
FILLED = {"role": "assistant", "content": None, "tool_calls": None, "name": "x"}


def test_a_document_is_found_in_the_column_that_is_named_or_has_a_usual_name():
    for row, column, document in (
        ("bare", None, "bare"),
        ({"prompt": "p", "text": "t", "messages": CHAT}, None, CHAT),
        ({"content": "c", "text": "t"}, None, "t"),
        ({"id": "1", "document": "d"}, None, "d"),
        ({"prompt": "p", "completion": "c", "answer": 3}, None, "p\n\nc"),
        ({"instruction": "do", "input": "", "output": "done"}, None, "do\n\ndone"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, None, CHAT),
        ({"n": 1, "story": "s"}, None, "s"),
        ({"text": None}, None, ""),
        ({"text": "t", "body": "b"}, "body", "b"),
        ({"text": "t", "talk": CHAT}, "talk", CHAT),
        ({"conversations": SHAREGPT}, None, [{"role": role, "content": text} for role, text in ROLES]),
        ({"messages": [FILLED]}, None, [{"role": "assistant", "content": None, "name": "x"}]),
    ):
        assert find_document(row, column) == document


def test_an_unusable_row_says_what_it_has_and_what_to_do():
    for row, column, message in (
        ({"a": "x", "b": "y"}, "c", NO_COLUMN),
        ({"a": "x", "b": "y"}, None, "cannot tell which column holds the text; columns: a, b;"),
        ({"text": 3}, None, "column 'text' holds int, neither text nor a list of chat messages"),
        ({"messages": [{"who": "me"}]}, None, "has the keys who; it needs role and content, or"),
        ({}, None, "the row holds nothing"),
        ({"messages": [{"from": ["x"], "value": "y"}]}, None, "it needs role and content, or"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            find_document(row, column)


def text_parts(*texts):
    # Arrow fills what other kinds of parts have
    return [{"type": "text", "text": text, "image_url": None} for text in texts]


def test_words_are_counted_and_a_blank_document_has_none():
    assert [count_words(text) for text in ("", "one two\nthree", [])] == [0, 3, 0]
    for contents, words in (((" ", None), 0), ((text_parts(" ", "a b"), ""), 2), (("", "a"), 1)):
        assert count_words([{"role": "user", "content": content} for content in contents]) == words


def recipe_of(**settings):
    return DataRecipe(**({"dataset": "d", "samples": 2, "seq_len": 64} | settings))


def tokenize(rows, tokenizer, recipe):
    located = ((f"a.jsonl, line {n}", row) for n, row in enumerate(rows, 1))
    pieces, warnings, words, *_ = tokenize_rows(located, tokenizer, recipe)
    return [piece.ids for piece in pieces], warnings, words


def test_a_text_has_the_bos_of_its_tokenizer_and_a_chat_that_of_its_template(tokenizer, byte_tokenizer):
    assert tokenizer.decode(encode("hi", tokenizer)) == "<s>hi"
    ids = encode(CHAT, tokenizer)
    assert tokenizer.decode(ids) == "<s><|user|>hi<|assistant|>yo"
    # the marker is one token, not the characters it is written with
    assert ids[1] == tokenizer.convert_tokens_to_ids("<|user|>")
    no_bos = byte_tokenizer(chat_template="{{ messages[0].content }}")
    assert no_bos.decode(encode(CHAT, no_bos)) == "hi"
    said = "the dataset holds chats but the model has no chat template; use a dataset with a text "
    said += "column (`--set data.column=NAME`) or a model whose tokenizer has a template"
    with pytest.raises(InputError, match=f"^{re.escape(said)}$"):
        encode(CHAT, byte_tokenizer())


def test_only_as_many_rows_and_tokens_are_read_as_are_needed(tokenizer):
    rows = iter(["abcdef", " \n", {"text": "t", "body": "b"}, "c"])
    samples, warnings, _ = tokenize(rows, tokenizer, recipe_of(seq_len=4, column="body"))
    assert ([tokenizer.decode(ids) for ids in samples], warnings) == (["<s>abc", "<s>b"], ())
    assert list(rows) == ["c"]


def test_chats_that_the_template_refuses_are_skipped_with_a_warning(tokenizer):
    no_content = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]
    rows = [{"messages": chat} for chat in (SYSTEM, CHAT, no_content, CHAT)]
    samples, warnings, _ = tokenize(rows, tokenizer, recipe_of())
    assert [tokenizer.decode(ids) for ids in samples] == ["<s><|user|>hi<|assistant|>yo"] * 2
    why = "the tokenizer's chat template refused with 'System role not supported'"
    assert warnings == (f"2 chats were skipped: {why}",)
    _, warnings, _ = tokenize(rows[:2], tokenizer, DataRecipe(dataset="d"))
    first, second = warnings
    assert first == f"1 chat was skipped: {why}"
    assert second == "512 samples are the default and dataset 'd' has 1; it is used"


def test_text_parts_are_joined_for_templates_that_take_strings(byte_tokenizer):
    for written, expected in (
        ("{{ '' + m.content }}", "q\nmore"),
        ("{{ m.content | trim }}", "q\nmore"),  # Llama 3's way, which writes a list as Python does
        ("{% for part in m.content %}{% if part.text %}{{ part.text }}{% endif %}{% endfor %}", "qmore"),
    ):
        template = "{% for m in messages %}{{ '<|' + m.role + '|>' }}" + written + "{% endfor %}"
        tokenizer = byte_tokenizer(chat_template=template)
        chat = [{"role": "user", "content": text_parts("q", "more")}, *CHAT[1:]]
        (ids,), warnings, _ = tokenize([{"messages": chat}], tokenizer, recipe_of(samples=1))
        assert (tokenizer.decode(ids), warnings) == (f"<|user|>{expected}<|assistant|>yo", ())


def test_chats_of_more_than_text_are_skipped_with_a_warning(tokenizer):
    for content, reason in (
        ([{"type": "image_url", "image_url": {}}, *text_parts("q")], "a part of type 'image_url'"),
        ([{"type": "image", "text": "a cat"}], "a part of type 'image'"),
        ([{"type": "text", "text": None}], "a part of type 'text' without text"),
        (["q"], "neither text nor parts"),
        ({"text": "q"}, "neither text nor parts"),
    ):
        row = {"messages": [{"role": "user", "content": content}]}
        # the last one is not read
        samples, (warning,), _ = tokenize([{"text": "a"}, row, row, "b", row], tokenizer, recipe_of())
        assert [tokenizer.decode(ids) for ids in samples] == ["<s>a", "<s>b"]
        assert warning.startswith("2 rows were skipped: they hold no text that can be read (such as ")
        assert "a.jsonl, line 2: " in warning
        assert reason in warning
    _, (_, few), _ = tokenize([{"text": "a"}, row, "b"], tokenizer, recipe_of(samples=3))
    unordered = SkippedRows(unusable=["a.jsonl, line 12: x", "a.jsonl, line 4: y"])
    assert unordered.example == "a.jsonl, line 4: y"
    assert few.startswith("3 samples were asked for and dataset 'd' has 2; all 2 ")


EMPTY = r"^dataset 'd' is empty: no row holds any text; use "
TOO_MANY = MAX_REFUSALS + 5
ALL_REFUSED = r"refused every chat of dataset 'd' \(System role not supported\); use another datas"
HALF = r"^a\.jsonl, line 2: .*surrogate.*remove the row$"


def test_data_without_text_or_with_damage_is_an_error_and_read_no_further(tokenizer):
    for rows, message, left in (
        *((rows, EMPTY, 0) for rows in ([], ["", " \n"], [{"text": None}], [{"messages": []}])),
        ([{"a": 1}], r"^a\.jsonl, line 1: cannot tell which column holds the", 0),
        ([{"a": 1}] * TOO_MANY, r"^none of 100 rows holds .* \(such as a\.jsonl, line 1: cannot tell", 5),
        ([" ", *[{"messages": SYSTEM}] * TOO_MANY], ALL_REFUSED, 5),
        (["a", "\ud800", "b"], HALF, 1),
        (["a", {"messages": [{"role": "user", "content": "x\udfff"}]}, "b"], HALF, 1),
    ):
        rows = iter(rows)
        with pytest.raises(InputError, match=message):
            tokenize(rows, tokenizer, recipe_of())
        assert len(list(rows)) == left


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
    # a sample of 64 holds 63 characters, and the token in front
    for characters, lengths in ((63, [64]), (70, [64]), (71, [64, 9]), (126, [64, 64]), (127, [64, 64])):
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
