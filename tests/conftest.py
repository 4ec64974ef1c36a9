"""Fixtures shared by all tests."""

import os
from pathlib import Path

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

# kinds of slow tests, which `make test-fast` leaves out: where they are, or a fixture they use
KINDS = {
    "browser": ["calib/evaluate/test_html_browser.py", "test_site.py"],
    "real_model": ["smollm2_directory", "calib/evaluate/test_smollm2.py", "test_demo.py"],
    "mutation": ["runtime/test_mutations.py"],
    "interpreter": [
        "runtime/",
        "ptx/",
        "calib/test_bench.py",
        "test_bench_",
        "calib/test_generate.py",
    ],
    "whole_job": [
        *("calib/evaluate/", "calib/layerwise/", "calib/scales/test_center_keys.py", "calib/test_"),
        *(
            "calib/models/test_quantized.py",
            "calib/serving/test_server_logprobs.py",
            "calib/rescale/",
            "calib/formats/test_two",
            "calib/transfer/",
        ),
        *("calib/capture/test_processes.py", "calib/capture/test_resume.py", "test_streams.py"),
        *(
            "test_signals.py",
            "test_examples.py",
            "test_cli.py::test_a_signal",
            "test_cli.py::test_a_full_disk",
        ),
    ],
}
# of those places, what takes no time
FAST = ("runtime/test_blocks.py", "runtime/test_fp8.py", "runtime/test_cache", "runtime/test_bound")


def pytest_collection_modifyitems(items):
    root = Path(__file__).parent
    for place in (place for places in KINDS.values() for place in places if place != "smollm2_directory"):
        assert any(root.glob(f"{place.partition('::')[0]}*")), f"KINDS names {place}, which is not there"
    for item in items:
        place = item.path.relative_to(root).as_posix() + f"::{item.name}"
        for kind, places in KINDS.items():
            found = place.startswith(tuple(places)) and not place.startswith(FAST)
            if found or not set(item.fixturenames).isdisjoint(places):
                item.add_marker(kind)


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/calib/formats/golden; read the diff",
    )


@pytest.fixture(scope="session")
def tiny_llama():
    return tiny_model("llama")


@pytest.fixture(scope="session")
def smollm2_directory():
    """The real model, from the package that `make` installs."""
    from calib.models.sources import builtin_model

    return builtin_model("builtin:smollm2")


@pytest.fixture
def tiny_directory(tmp_path, tiny_llama):
    """A tiny Llama as a Hugging Face directory, with a word-level tokenizer."""
    return save_model(tiny_llama, tmp_path / "tiny-llama")
