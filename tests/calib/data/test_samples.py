"""Samples are what the model would read: one BOS, the template's markers, seq_len at most."""

import pytest

from calib.data.samples import MAX_REFUSALS, encode, tokenize_rows
from calib.errors import InputError
from calib.recipe import DataRecipe

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SYSTEM = [{"role": "system", "content": "be brief"}, *CHAT]


def recipe_of(**settings):
    return DataRecipe(**({"dataset": "d", "samples": 2, "seq_len": 64} | settings))


def tokenize(rows, tokenizer, recipe):
    located = ((f"a.jsonl, line {n}", row) for n, row in enumerate(rows, 1))
    pieces, warnings, words = tokenize_rows(located, tokenizer, recipe)
    return [piece.ids for piece in pieces], warnings, words


def test_a_text_gets_the_bos_of_its_tokenizer_and_a_chat_that_of_its_template_alone(
    tokenizer, byte_tokenizer
):
    assert tokenizer.decode(encode("hi", tokenizer)) == "<s>hi"
    ids = encode(CHAT, tokenizer)
    assert tokenizer.decode(ids) == "<s><|user|>hi<|assistant|>yo"
    # the marker is one token, not the characters it is written with
    assert ids[1] == tokenizer.convert_tokens_to_ids("<|user|>")
    no_bos = byte_tokenizer(chat_template="{{ messages[0].content }}")
    assert no_bos.decode(encode(CHAT, no_bos)) == "hi"


def test_only_as_many_rows_and_tokens_are_read_as_are_needed(tokenizer):
    rows = iter(["abcdef", " \n", {"text": "t", "body": "b"}, "c"])
    samples, warnings, _ = tokenize(rows, tokenizer, recipe_of(seq_len=4, column="body"))
    assert [tokenizer.decode(ids) for ids in samples] == ["<s>abc", "<s>b"]
    assert warnings == ()
    assert list(rows) == ["c"]


@pytest.mark.parametrize("rows", [[], ["", " \n"], [{"text": None}], [{"messages": []}]])
def test_no_usable_document_is_an_error(tokenizer, rows):
    with pytest.raises(InputError, match=r"^dataset 'd' is empty: no row holds any text; use "):
        tokenize(rows, tokenizer, recipe_of())


def test_a_chat_without_a_template_says_what_to_do(byte_tokenizer):
    with pytest.raises(InputError) as caught:
        encode(CHAT, byte_tokenizer())
    assert str(caught.value) == (
        "the dataset holds chats but the tokenizer has no chat template; use a dataset with a text "
        "column (`--set data.column=NAME`) or a model whose tokenizer has a template"
    )


def test_chats_that_the_template_refuses_are_skipped_with_a_warning(tokenizer):
    no_content = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]
    rows = [{"messages": chat} for chat in (SYSTEM, CHAT, no_content, CHAT)]
    samples, warnings, _ = tokenize(rows, tokenizer, recipe_of())
    assert [tokenizer.decode(ids) for ids in samples] == ["<s><|user|>hi<|assistant|>yo"] * 2
    assert warnings == (
        "2 chats were skipped because the tokenizer's chat template refused them (System role not supported)",
    )


def text_parts(*texts):
    # Arrow fills what other kinds of parts have
    return [{"type": "text", "text": text, "image_url": None} for text in texts]


PARTS_ONLY = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
STRINGS = {
    "adds": "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}",
    # Llama 3's way, which writes a list as Python does
    "trims": "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content | trim }}{% endfor %}",
}


@pytest.mark.parametrize("template", STRINGS.values())
def test_text_parts_are_joined_for_templates_that_take_strings(byte_tokenizer, template):
    tokenizer = byte_tokenizer(chat_template=template)
    chat = [{"role": "user", "content": text_parts("q", "more")}, *CHAT[1:]]
    (ids,), warnings, _ = tokenize([{"messages": chat}], tokenizer, recipe_of(samples=1))
    assert tokenizer.decode(ids) == "<|user|>q\nmore<|assistant|>yo"
    assert warnings == ()


def test_a_template_that_takes_parts_alone_gets_parts(byte_tokenizer):
    tokenizer = byte_tokenizer(chat_template=PARTS_ONLY)
    chat = [{"role": "user", "content": text_parts("q", "more")}, *CHAT[1:]]
    assert tokenizer.decode(encode(chat, tokenizer)) == "<|user|>qmore<|assistant|>yo"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {}}, *text_parts("q")], "a part of type 'image_url'"),
        ([{"type": "image", "text": "a cat"}], "a part of type 'image'"),
        ([{"type": "text", "text": None}], "a part of type 'text' without text"),
        (["q"], "neither text nor parts"),
        ({"text": "q"}, "neither text nor parts"),
    ],
)
def test_chats_of_more_than_text_are_skipped_with_a_warning(tokenizer, content, reason):
    chat = [{"role": "user", "content": content}]
    rows = [{"text": "a"}, {"messages": chat}, {"messages": chat}, {"text": "b"}]
    samples, (warning,), _ = tokenize(rows, tokenizer, recipe_of())
    assert [tokenizer.decode(ids) for ids in samples] == ["<s>a", "<s>b"]
    assert warning.startswith("2 rows were skipped: they hold no text that can be read (such as ")
    assert "a.jsonl, line 2: " in warning
    assert reason in warning


@pytest.mark.parametrize("row", [{}, {"a": "x", "b": "y"}])
def test_rows_without_text_among_good_ones_are_skipped_and_counted(tokenizer, row):
    samples, (warning,), _ = tokenize(["a", row, row, "b", row], tokenizer, recipe_of())
    assert [tokenizer.decode(ids) for ids in samples] == ["<s>a", "<s>b"]
    assert warning.startswith("2 rows were skipped: ")
    assert "a.jsonl, line 2: " in warning


def test_rows_that_all_lack_text_are_an_error_that_says_why(tokenizer):
    rows = iter([{"a": 1}] * (MAX_REFUSALS + 5))
    with pytest.raises(InputError, match=r"^a\.jsonl, line 1: cannot tell which column holds the"):
        tokenize(rows, tokenizer, recipe_of())
    assert len(list(rows)) == 5


@pytest.mark.parametrize("row", ["\ud800", {"messages": [{"role": "user", "content": "x\udfff"}]}])
def test_half_a_surrogate_pair_is_damage(tokenizer, row):
    with pytest.raises(InputError, match=r"^a\.jsonl, line 2: .*surrogate.*remove the row$"):
        tokenize(["a", row, "b"], tokenizer, recipe_of())


def test_a_template_that_refuses_everything_ends_the_search(tokenizer):
    rows = iter([{"messages": SYSTEM}] * (MAX_REFUSALS + 5))
    message = r"refused every chat of dataset 'd' \(System role not supported\); use another datas"
    with pytest.raises(InputError, match=message):
        tokenize(rows, tokenizer, recipe_of())
    assert len(list(rows)) == 5
