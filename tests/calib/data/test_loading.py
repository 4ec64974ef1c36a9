"""The whole way from a recipe to fingerprinted samples."""

import hashlib
import json

import pytest

from calib import data
from calib.data import CalibrationData, load_data
from calib.data.samples import Piece
from calib.errors import InputError
from calib.recipe import DataRecipe

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def fingerprint(*samples):
    return CalibrationData([Piece(0, len(ids), ids) for ids in samples], "text").fingerprint


def no_model():
    raise AssertionError("text needs no model")


@pytest.fixture
def mixed(tmp_path):
    rows = [{"messages": CHAT}, {"text": "plain"}, {"text": " "}]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "mixed.jsonl")


def test_public_names_are_sorted_and_there():
    assert data.__all__ == sorted(data.__all__)
    assert all(hasattr(data, name) for name in data.__all__)


def test_a_local_file_becomes_samples_with_source_and_warnings(mixed, tokenizer):
    loaded = load_data(DataRecipe(dataset=mixed, split="x", samples=9), tokenizer, no_model)
    texts = {tokenizer.decode(ids) for ids in loaded.samples}
    assert texts == {"<s><|user|>hi<|assistant|>yo", "<s>plain"}
    assert loaded.num_tokens == 7 + 6
    assert loaded.source == mixed
    assert loaded.fingerprint == fingerprint(*loaded.samples)
    assert loaded.warnings == (
        f"data.split 'x' is ignored: dataset '{mixed}' has none",
        f"9 samples were asked for and dataset '{mixed}' has 2; all 2 are used",
    )


def test_python_docs_fill_64_samples_of_512_tokens(tokenizer):
    recipe = DataRecipe(dataset="builtin:python-docs", samples=64, seq_len=512)
    loaded = load_data(recipe, tokenizer, no_model)
    assert [len(sample) for sample in loaded.samples] == [512] * 64
    assert (loaded.source, loaded.warnings) == ("builtin:python-docs", ())
    assert load_data(recipe, tokenizer, no_model) == loaded
    other = load_data(recipe.model_copy(update={"seed": 1}), tokenizer, no_model)
    assert other.fingerprint != loaded.fingerprint


@pytest.mark.parametrize(
    ("dataset", "warning"),
    [
        ("self", "dataset 'self' is text that the model made up"),
        ("random", "dataset 'random' is uniform random token ids, what vLLM's removed on-the-fly"),
    ],
)
def test_generated_samples_come_with_a_warning(tokenizer, tiny_llama, dataset, warning):
    recipe = DataRecipe(dataset=dataset, column="text", samples=3, seq_len=8)
    loaded = load_data(recipe, tokenizer, lambda: tiny_llama)
    assert (len(loaded.samples), loaded.source) == (3, dataset)
    assert loaded.warnings[0].startswith(warning)
    assert loaded.warnings[1] == f"data.column 'text' is ignored: dataset '{dataset}' has none"
    assert loaded == load_data(recipe, tokenizer, lambda: tiny_llama)


def test_a_bad_dataset_is_found_before_the_model_is_loaded(tokenizer):
    with pytest.raises(InputError, match=r"no file or directory '\./gone\.txt'"):
        load_data(DataRecipe(dataset="./gone.txt"), tokenizer, no_model)


def test_the_fingerprint_is_the_sha256_of_lengths_and_ids():
    words = [2, 5, 6, 1, 7]
    expected = hashlib.sha256(b"".join(w.to_bytes(8, "little") for w in words)).hexdigest()
    assert fingerprint([5, 6], [7]) == expected


def test_the_fingerprint_sees_boundaries_and_order():
    prints = {fingerprint(*samples) for samples in ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]], [[1, 2, 3]])}
    assert len(prints) == 4
