"""Marks of checkpoints that quantisation tools have written, beside the model they began with."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from calib.files.model_directory import open_model_directory
from calib.same_model.mark_comparison import OtherWeightsError, compare_marks
from calib.same_model.marks import take_marks

GOLDEN = Path(__file__).parents[2] / "golden" / "quantized"
MODULES = [f"model.layers.{i}.self_attn" for i in range(2)]
# as benchmarks/peers/tiny_llama.py makes them
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}


def began_with(directory, **shape):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, head_dim=32, vocab_size=64, tie_word_embeddings=True,
        max_position_embeddings=256, initializer_range=0.2, **shape,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return take_marks(open_model_directory(directory), MODULES)


def written(package, case):
    (directory,) = GOLDEN.glob(f"{package}-*/{case}")
    return take_marks(open_model_directory(directory), MODULES)


@pytest.mark.parametrize(
    ("case", "moved", "error"),
    [
        ("fp8", 0, 0.03),
        ("w4a16", 0, 0.1),
        ("w4a16-awq", 2, 0.1),
        ("w8a8-smoothquant", 2, 0.02),
    ],
)
def test_llm_compressor(case, moved, error, tmp_path):
    found = compare_marks(began_with(tmp_path, **SHAPE), written("llmcompressor", case))
    assert found.layers_with_moved_factors == moved
    assert 0.005 < found.largest_error < error
    assert found.largest_factor < 0.05


def test_an_awq_that_rescaled_values(tmp_path):
    base, found = began_with(tmp_path, **WIDE), written("gptqmodel", "awq-w4")
    with pytest.raises(OtherWeightsError, match=r"v_proj.*AWQ"):
        compare_marks(base, found)
