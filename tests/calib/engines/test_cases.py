"""What is predicted of hand-made directories; `make interop` asks vLLM itself about the same."""

import sys
from pathlib import Path

import pytest

from calib.engines.catalogue import find_engine
from calib.engines.simulate_loading import simulate
from calib.files.model_directory import open_model_directory

sys.path.append(str(Path(__file__).parents[2] / "interop"))
from scale_cases import CASES, LAYERS, write_case


def words(simulation):
    """As the table of cases says it."""
    if simulation.refused:
        return "refused"
    loaded = [o.letter for o in simulation.outcomes if o.status == "loaded"]
    everywhere = [letter for letter in "kvq" if loaded.count(letter) == LAYERS]
    somewhere = [letter for letter in "kvq" if 0 < loaded.count(letter) < LAYERS]
    return " ".join(everywhere or somewhere) + (f" in 1 of {LAYERS}" if somewhere else "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vllm_is_predicted(case, tmp_path):
    directory = open_model_directory(write_case(case, tmp_path / "model"), weights=False)
    assert words(simulate(directory, find_engine("vllm"))) == case.expected


def test_there_are_enough_cases():
    assert len({case.name for case in CASES}) == len(CASES) >= 40
