"""A tiny Llama, its calibration, and the pack of that, for the tests of `fp8kv apply` and `fp8kv pack`."""

import pytest
from apply_cases import calibrated
from command_line import fp8kv
from families import save_model, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tiny_model("llama"), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    return calibrated(model, tmp_path_factory.mktemp("measured") / "out")


@pytest.fixture(scope="module")
def pack(measured, tmp_path_factory):
    path = tmp_path_factory.mktemp("pack") / "pack"
    done = fp8kv("pack", measured, "-o", path)
    assert done.exit_code == 0, done.stderr
    return path
