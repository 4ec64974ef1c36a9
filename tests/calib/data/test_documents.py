"""The text or chat of a row is found by column name, or the error says how to name the column."""

import pytest

from calib.data.samples import count_words, find_document
from calib.errors import InputError

NO_COLUMN = "no column 'c' in the dataset; columns: a, b; choose one with `--set data.column=NAME`"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize(
    ("row", "document"),
    [
        ("bare", "bare"),
        ({"prompt": "p", "text": "t", "messages": CHAT}, CHAT),
        ({"content": "c", "text": "t"}, "t"),
        ({"id": "1", "document": "d"}, "d"),
        ({"prompt": "p", "completion": "c", "answer": 3}, "p\n\nc"),
        ({"instruction": "do", "input": "", "output": "done"}, "do\n\ndone"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, CHAT),
        ({"n": 1, "story": "s"}, "s"),
        ({"text": None}, ""),
    ],
)
def test_the_document_is_found_without_naming_a_column(row, document):
    assert find_document(row, None) == document


def test_a_named_column_comes_before_any_other():
    assert find_document({"text": "t", "body": "b"}, "body") == "b"
    assert find_document({"text": "t", "talk": CHAT}, "talk") == CHAT


def test_sharegpt_turns_become_roles_and_contents():
    turns = [("system", "s"), ("human", "q"), ("gpt", "a"), ("tool", "t")]
    row = {"conversations": [{"from": who, "value": what} for who, what in turns]}
    roles = [("system", "s"), ("user", "q"), ("assistant", "a"), ("tool", "t")]
    assert find_document(row, None) == [{"role": r, "content": c} for r, c in roles]


def test_keys_that_arrow_filled_with_none_are_removed_but_not_the_content():
    message = {"role": "assistant", "content": None, "tool_calls": None, "name": "x"}
    expected = [{"role": "assistant", "content": None, "name": "x"}]
    assert find_document({"messages": [message]}, None) == expected


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [
        ({"a": "x", "b": "y"}, "c", NO_COLUMN),
        ({"a": "x", "b": "y"}, None, "cannot tell which column holds the text; columns: a, b;"),
        ({"text": 3}, None, "column 'text' holds int, neither text nor a list of chat messages"),
        ({"messages": [{"who": "me"}]}, None, "has the keys who; it needs role and content, or"),
        ({}, None, "the row holds nothing"),
        ({"messages": [{"from": ["x"], "value": "y"}]}, None, "it needs role and content, or"),
    ],
)
def test_an_unusable_row_says_what_it_has_and_what_to_do(row, column, message):
    with pytest.raises(InputError) as caught:
        find_document(row, column)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("", 0),
        ("one two\nthree", 3),
        ([], 0),
        ([{"role": "user", "content": " "}, {"role": "assistant", "content": None}], 0),
        ([{"role": "user", "content": [{"type": "text", "text": " "}]}], 0),
        ([{"role": "user", "content": [{"type": "text", "text": "a b"}]}], 2),
        ([{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}], 1),
    ],
)
def test_words_are_counted_and_a_blank_document_has_none(document, words):
    assert count_words(document) == words
