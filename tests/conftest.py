"""Fixtures shared by all tests."""

import os
import shutil
from pathlib import Path

# no test may reach the network: set before anything of Hugging Face is imported
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "COLUMNS": "200"}

import pytest
import torch

# Triton reads it when it is imported: without a GPU its interpreter runs the kernels
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from families import save_model, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from calib.errors import Fp8kvError

pytest_plugins = ["engine_fixtures"]
torch.manual_seed(0)


def made_of_one_line(error, *arguments):
    assert not any("\n" in str(each) for each in arguments), arguments


Fp8kvError.__init__ = made_of_one_line
# what `make test` leaves to `make test-slow`: a browser, a notebook, real models, PTX, mutants of kernels
SLOW = ("test_demo.py", "test_examples.py", "test_site.py", "calib/evaluate/test_html_browser.py", "ptx/")
SLOW += ("runtime/test_mutations.py",)


def pytest_collection_modifyitems(items):
    root = Path(__file__).parent
    for place in SLOW:
        assert (root / place).exists(), f"SLOW names {place}, which is not there"
    for item in items:
        is_slow = item.path.relative_to(root).as_posix().startswith(SLOW)
        if is_slow or "smollm2_directory" in item.fixturenames:
            item.add_marker("slow")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite formats/golden; read the diff")


SPECIAL = ("<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>")


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Every byte is a token, so that the text behind any sample can be read back exactly."""

    def made(**special):
        alphabet = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
        backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(list(SPECIAL))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | special
        return PreTrainedTokenizerFast(tokenizer_object=backend, **names)

    return made


@pytest.fixture(scope="session")
def tiny_llama():
    return tiny_model("llama")


@pytest.fixture(scope="session")
def smollm2_directory():
    """The real model, from the package that `make` installs."""
    from calib.models.sources import builtin_model

    return builtin_model("builtin:smollm2")


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory, tiny_llama):
    """A tiny Llama as a Hugging Face directory, with a word-level tokenizer, that no test changes."""
    return save_model(tiny_llama, tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def model(saved_llama):
    """The same, where a file has no other model."""
    return saved_llama


@pytest.fixture
def tiny_directory(tmp_path, saved_llama):
    """A copy of it, for one test."""
    return Path(shutil.copytree(saved_llama, tmp_path / "tiny-llama"))
