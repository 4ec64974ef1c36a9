"""A tiny Llama, calibrations of it, and a pack, which no test changes."""

import pytest
from apply_cases import calibrated, packed


@pytest.fixture(scope="session")
def measured(model, tmp_path_factory):
    return calibrated(model, tmp_path_factory.mktemp("measured") / "out")


@pytest.fixture(scope="session")
def per_head(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("measured") / "per_head"
    return calibrated(model, out, "--strategy", "attn_head", "--targets", "qkv")


@pytest.fixture(scope="session")
def pack(measured, tmp_path_factory):
    return packed(measured, tmp_path_factory.mktemp("pack") / "pack")
