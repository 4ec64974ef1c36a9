"""The text or chat of a row is found by column name; samples are what the model would read of it."""

import pytest

from calib.data.samples import MAX_REFUSALS, count_words, encode, find_document, tokenize_rows
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
        with pytest.raises(InputError) as caught:
            find_document(row, column)
        assert message in str(caught.value)


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
    pieces, warnings, words = tokenize_rows(located, tokenizer, recipe)
    return [piece.ids for piece in pieces], warnings, words


def test_a_text_has_the_bos_of_its_tokenizer_and_a_chat_that_of_its_template(tokenizer, byte_tokenizer):
    assert tokenizer.decode(encode("hi", tokenizer)) == "<s>hi"
    ids = encode(CHAT, tokenizer)
    assert tokenizer.decode(ids) == "<s><|user|>hi<|assistant|>yo"
    # the marker is one token, not the characters it is written with
    assert ids[1] == tokenizer.convert_tokens_to_ids("<|user|>")
    no_bos = byte_tokenizer(chat_template="{{ messages[0].content }}")
    assert no_bos.decode(encode(CHAT, no_bos)) == "hi"
    with pytest.raises(InputError) as caught:
        encode(CHAT, byte_tokenizer())
    assert str(caught.value) == (
        "the dataset holds chats but the tokenizer has no chat template; use a dataset with a text "
        "column (`--set data.column=NAME`) or a model whose tokenizer has a template"
    )


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
    assert warnings == (
        "2 chats were skipped because the tokenizer's chat template refused them (System role not supported)",
    )


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


EMPTY = r"^dataset 'd' is empty: no row holds any text; use "
TOO_MANY = MAX_REFUSALS + 5
ALL_REFUSED = r"refused every chat of dataset 'd' \(System role not supported\); use another datas"
HALF = r"^a\.jsonl, line 2: .*surrogate.*remove the row$"


def test_data_without_text_or_with_damage_is_an_error_and_read_no_further(tokenizer):
    for rows, message, left in (
        *((rows, EMPTY, 0) for rows in ([], ["", " \n"], [{"text": None}], [{"messages": []}])),
        ([{"a": 1}] * TOO_MANY, r"^a\.jsonl, line 1: cannot tell which column holds the", 5),
        ([{"messages": SYSTEM}] * TOO_MANY, ALL_REFUSED, 5),
        (["a", "\ud800", "b"], HALF, 1),
        (["a", {"messages": [{"role": "user", "content": "x\udfff"}]}, "b"], HALF, 1),
    ):
        rows = iter(rows)
        with pytest.raises(InputError, match=message):
            tokenize(rows, tokenizer, recipe_of())
        assert len(list(rows)) == left
