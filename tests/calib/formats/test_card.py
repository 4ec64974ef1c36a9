"""Cards: what files of others say stays in its line and is no markup; a fact that is missing is an error."""

from pathlib import Path

import jinja2
import pytest

from calib.formats.card import format_card, render_card


def test_text_of_others_cannot_begin_a_line_or_steer_a_terminal():
    card = format_card("m\n# Mine\x1b[2J", "vllm", Path("out"), "tensor", warnings=["a\n# b"])
    assert [line for line in card.splitlines() if line.startswith("#")] == [card.splitlines()[0]]
    assert "\x1b" not in card
    assert card.splitlines()[-1] == "- a\N{REPLACEMENT CHARACTER}# b"


def test_markup_of_others_is_quoted_in_a_pack():
    facts = {"model": "a|b"}
    card = render_card("pack", model="*m*", facts=facts, evaluation=None, layers=[], warnings=["[x](y)"])
    assert r"# FP8 KV-cache scales for \*m\*" in card
    assert r"| model | a\|b |" in card
    assert r"- \[x\](y)" in card


def test_a_card_without_its_facts_is_an_error():
    with pytest.raises(jinja2.UndefinedError):
        render_card("bake", model="m")
