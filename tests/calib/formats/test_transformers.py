"""Which outputs plain transformers opens, and that cards say it of the others."""

from importlib.util import find_spec

import pytest
from command_line import calibrate, fp8kv
from transformers import AutoModelForCausalLM

from calib.formats import FORMATS

# whatever needs it cannot be seen where it is
pytestmark = pytest.mark.skipif(
    find_spec("compressed_tensors") is not None, reason="compressed-tensors is installed"
)
CARD = "transformers opens this directory only where `compressed-tensors` is installed"
NEEDS = {"vllm", "aphrodite", "sglang"}


def opens(directory):
    try:
        AutoModelForCausalLM.from_pretrained(directory)
    except ImportError as error:
        return "compressed-tensors" not in str(error)
    return True


def test_the_card_says_what_transformers_needs_to_open_an_output(tiny_directory, tmp_path):
    formats = [name for name, each in FORMATS.items() if each.with_weights]
    flags = [flag for name in formats for flag in ("--format", name)]
    assert calibrate(tiny_directory, "-o", tmp_path / "out", *flags).exit_code == 0
    source = tmp_path / "out" / "vllm"
    for name in {*FORMATS} - {"fp8kv"}:
        converted = tmp_path / f"converted-{name}"
        assert fp8kv("convert", source, "--to", name, "-o", converted).exit_code == 0
    for name in formats:
        for directory in (tmp_path / "out" / name, tmp_path / f"converted-{name}"):
            says = CARD in (directory / "README.md").read_text()
            assert says == (name in NEEDS) == (not opens(directory)), directory
    assert CARD not in (tmp_path / "converted-json" / "README.md").read_text()
    stripped = tmp_path / "stripped"
    assert fp8kv("strip", source, "-o", stripped).exit_code == 0
    assert opens(stripped)
