"""Fixtures shared by all tests."""

import os

# no test may reach the network: set before anything of Hugging Face is imported
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "COLUMNS": "200"}

import pytest
import torch

# Triton reads it when it is imported: without a GPU its interpreter runs the kernels
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from families import save_model, tiny_model

pytest_plugins = ["engine_fixtures"]

torch.manual_seed(0)


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/calib/export/golden; read the diff",
    )


@pytest.fixture(scope="session")
def tiny_llama():
    return tiny_model("llama")


@pytest.fixture(scope="session")
def smollm2_directory():
    """The real model, from the package that `make` installs."""
    from calib.model.find import builtin_model

    return builtin_model("builtin:smollm2")


@pytest.fixture
def tiny_directory(tmp_path, tiny_llama):
    """A tiny Llama as a Hugging Face directory, with a word-level tokenizer."""
    return save_model(tiny_llama, tmp_path / "tiny-llama")
