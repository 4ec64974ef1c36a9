"""Samples are what the model would read: one BOS, the template's markers, cut at seq_len."""

import pytest

from calib.data.tokens import MAX_REFUSALS, encode, tokenize_rows
from calib.errors import InputError
from calib.recipe import DataRecipe

BOS = 0
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SYSTEM = [{"role": "system", "content": "be brief"}, *CHAT]


def recipe_of(**settings):
    return DataRecipe(**({"dataset": "d", "samples": 2, "seq_len": 64} | settings))


def test_text_gets_the_bos_of_the_tokenizer(tokenizer):
    ids = encode("hi", tokenizer)
    assert ids.count(BOS) == 1
    assert tokenizer.decode(ids) == "<s>hi"


def test_a_chat_gets_the_bos_of_its_template_and_no_second_one(tokenizer):
    ids = encode(CHAT, tokenizer)
    assert ids.count(BOS) == 1
    assert tokenizer.decode(ids) == "<s><|user|>hi<|assistant|>yo"
    # the marker is one token, not the characters it is written with
    assert ids[1] == tokenizer.convert_tokens_to_ids("<|user|>")


def test_a_template_without_bos_adds_none(byte_tokenizer):
    no_bos = byte_tokenizer(chat_template="{{ messages[0].content }}")
    assert no_bos.decode(encode(CHAT, no_bos)) == "hi"


def test_samples_are_cut_at_seq_len(tokenizer):
    samples, _ = tokenize_rows(["abcdef", "xy"], tokenizer, recipe_of(seq_len=4))
    assert [tokenizer.decode(ids) for ids in samples] == ["<s>abc", "<s>xy"]


def test_only_as_many_rows_are_read_as_are_needed(tokenizer):
    rows = iter(["a", " \n", "b", "c"])
    samples, warnings = tokenize_rows(rows, tokenizer, recipe_of())
    assert [tokenizer.decode(ids) for ids in samples] == ["<s>a", "<s>b"]
    assert warnings == ()
    assert list(rows) == ["c"]


def test_too_few_documents_are_all_used_with_a_warning(tokenizer):
    samples, warnings = tokenize_rows(["a", "", "b"], tokenizer, recipe_of(samples=5))
    assert len(samples) == 2
    assert warnings == ("5 samples were asked for and dataset 'd' has 2; all 2 are used",)


@pytest.mark.parametrize("rows", [[], ["", " \n"], [{"text": None}], [{"messages": []}]])
def test_no_usable_document_is_an_error(tokenizer, rows):
    with pytest.raises(InputError, match=r"^dataset 'd' is empty: no row holds any text; use "):
        tokenize_rows(rows, tokenizer, recipe_of())


def test_the_column_of_the_recipe_is_read(tokenizer):
    rows = [{"text": "t", "body": "b"}]
    samples, _ = tokenize_rows(rows, tokenizer, recipe_of(column="body"))
    assert [tokenizer.decode(ids) for ids in samples] == ["<s>b"]


def test_a_chat_without_a_template_says_what_to_do(byte_tokenizer):
    with pytest.raises(InputError) as caught:
        encode(CHAT, byte_tokenizer())
    assert str(caught.value) == (
        "the dataset holds chats but the tokenizer has no chat template; use a dataset with a text "
        "column (`--set data.column=NAME`) or a model whose tokenizer has a template"
    )


def test_chats_that_the_template_refuses_are_skipped_with_a_warning(tokenizer):
    no_content = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    rows = [{"messages": chat} for chat in (SYSTEM, CHAT, no_content, parts, CHAT)]
    samples, warnings = tokenize_rows(rows, tokenizer, recipe_of())
    assert [tokenizer.decode(ids) for ids in samples] == ["<s><|user|>hi<|assistant|>yo"] * 2
    assert warnings == (
        "3 chats were skipped because the tokenizer's chat template refused them "
        "(System role not supported)",
    )


def test_a_template_that_refuses_everything_ends_the_search(tokenizer):
    rows = iter([{"messages": SYSTEM}] * (MAX_REFUSALS + 5))
    message = r"refused every chat of dataset 'd' \(System role not supported\); use another datas"
    with pytest.raises(InputError, match=message):
        tokenize_rows(rows, tokenizer, recipe_of())
    assert len(list(rows)) == 5
