"""One small evaluation, for the tests of what becomes of it."""

import pytest
from families import FAMILIES, save_model, tiny_model

from calib.eval.run import evaluate
from calib.eval.schema import Suite
from calib.eval.summarize import summarize
from calib.recipe import load_recipe

VARIANTS = ["none", "tensor", "attn_head", "channel", "k only"]


@pytest.fixture(scope="session")
def small_directory(tmp_path_factory):
    model = tiny_model("mistral", **FAMILIES["mistral"])
    return save_model(model, tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def small_recipe():
    choices = {"data.dataset": "random", "device": "cpu", "dtype": "float32"}
    return load_recipe(None, {**choices, "evaluation.variants": VARIANTS})


@pytest.fixture(scope="session")
def small_evaluation(small_directory, small_recipe):
    return evaluate(str(small_directory), small_recipe, suite=Suite(3, 3, 40, 2, 6, (), (), 2))


@pytest.fixture(scope="session")
def small_report(small_evaluation):
    """The object in report.json."""
    return summarize(small_evaluation).to_json()
