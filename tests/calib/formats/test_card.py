"""Cards and the table of formats: what they say of transformers, and text of others in its line."""

from importlib.util import find_spec
from pathlib import Path

import jinja2
import pytest
from command_line import calibrate, ran
from formats_table import PAGE, page
from transformers import AutoModelForCausalLM

from calib.formats import FORMATS
from calib.formats.card import format_card, render_card

NEEDING = "transformers opens this directory only where `compressed-tensors` is installed"


def test_text_of_others_cannot_begin_a_line_or_steer_a_terminal_and_its_markup_is_quoted_in_a_pack():
    card = format_card("m\n# Mine\x1b[2J", "vllm", Path("out"), "tensor", warnings=["a\n# b"])
    first, *lines = card.splitlines()
    assert first.startswith("#")
    assert not [line for line in lines if line.startswith("#")]
    assert "\x1b" not in card
    assert lines[-1] == "- a\N{REPLACEMENT CHARACTER}# b"
    facts = {"facts": {"model": "a|b"}, "evaluation": None, "layers": [], "warnings": ["[x](y)"]}
    card = render_card("pack", model="*m*", **facts)
    for quoted in (r"# FP8 KV-cache scales for \*m\*", r"| model | a\|b |", r"- \[x\](y)"):
        assert quoted in card
    with pytest.raises(jinja2.UndefinedError):
        render_card("bake", model="a card without its facts")


def test_the_table_of_formats_is_fresh():
    assert PAGE.read_text() == page(), "make formats-table"


def opens(directory):
    try:
        AutoModelForCausalLM.from_pretrained(directory)
    except ImportError as error:
        return "compressed-tensors" not in str(error)
    return True


# whatever needs it cannot be seen where it is
@pytest.mark.skipif(find_spec("compressed_tensors") is not None, reason="compressed-tensors is installed")
def test_the_card_says_what_transformers_needs_to_open_an_output(tiny_directory, tmp_path):
    formats = [name for name, each in FORMATS.items() if each.with_weights]
    flags = [flag for name in formats for flag in ("--format", name)]
    assert calibrate(tiny_directory, "-o", tmp_path / "out", *flags).exit_code == 0
    source = tmp_path / "out" / "vllm"
    for name in {*FORMATS} - {"fp8kv"}:
        ran("convert", source, "--to", name, "-o", tmp_path / f"converted-{name}")
    for name in formats:
        for directory in (tmp_path / "out" / name, tmp_path / f"converted-{name}"):
            says = NEEDING in (directory / "README.md").read_text()
            assert says == (name in ("vllm", "aphrodite", "sglang")) == (not opens(directory)), directory
    assert NEEDING not in (tmp_path / "converted-json" / "README.md").read_text()
    ran("strip", source, "-o", tmp_path / "stripped")
    assert opens(tmp_path / "stripped")
