"""A tiny Llama and its calibration, for the tests of `fp8kv apply`."""

import pytest
from apply_cases import calibrated
from families import save_model, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tiny_model("llama"), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    return calibrated(model, tmp_path_factory.mktemp("measured") / "out")
