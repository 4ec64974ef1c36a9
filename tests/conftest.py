"""Fixtures shared by all tests."""

import json
import os

# no test may reach the network: set before anything of Hugging Face is imported
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "COLUMNS": "200"}

import pytest
import torch

# Triton reads it when it is imported: without a GPU its interpreter runs the kernels
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from families import tiny_model

pytest_plugins = ["engine_fixtures"]

torch.manual_seed(0)


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/calib/export/golden; read the diff"
    )


@pytest.fixture(scope="session")
def tiny_llama():
    return tiny_model("llama")


@pytest.fixture(scope="session")
def smollm2_directory():
    """The real model, from the package that `make` installs."""
    from calib.model.builtin import builtin_model

    return builtin_model("builtin:smollm2")


@pytest.fixture
def tiny_directory(tmp_path, tiny_llama):
    """A tiny Llama as a Hugging Face directory, with a word-level tokenizer."""
    return save_model(tiny_llama, tmp_path / "tiny-llama")


def save_model(model, directory):
    model.save_pretrained(directory)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 128)}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, token in enumerate(("<pad>", "<s>", "</s>"))
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<pad>"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )
    return directory
