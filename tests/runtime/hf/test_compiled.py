"""`torch.compile(model)` on the FP8 cache: what surrounds the decoder is compiled, the text is the same."""

import pytest
import torch
from fake_quant import scales_for
from families import FAMILIES, LATENT, tiny_model
from torch._dynamo.utils import counters
from transformers import DynamicCache

from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf import fp8_attention, paged_cache

IDS = torch.tensor([[0, 0, 0, 5, 81, 7, 44, 9], [3, 99, 12, 6, 70, 8, 31, 20]])
MASK = (IDS != 0).long()


@pytest.fixture(autouse=True)
def nan_in_new_memory():
    """Nothing: torch.compile cannot trace what would stand in for `torch.empty`."""


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def greedy(call, cache, ids, mask):
    """Logits of a prompt's last token and of one more."""
    logits = []
    for _ in range(2):
        padding = {} if mask is None else {"attention_mask": mask}
        logits.append(call(ids, past_key_values=cache, **padding).logits[:, -1])
        ids = logits[-1].argmax(-1)[:, None]
        mask = None if mask is None else torch.cat([mask, mask[:, -1:]], 1)
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("family", "backend", "mask"),
    [("gemma2", "torch", MASK), ("deepseek_v3", "torch", None), ("llama", "triton", MASK)],
)
def test_a_compiled_model_says_and_refuses_the_same(family, backend, mask):
    model = tiny_model(family, **(FAMILIES | LATENT)[family], num_hidden_layers=2)
    ids, caches = IDS if mask is not None else IDS[1:], [DynamicCache(config=model.config) for _ in "ab"]
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), fp8_attention(model, scales_for(model), backend=backend, block_size=4):
        expected = greedy(model, caches[0], ids, mask)
        found = greedy(compiled, caches[1], ids, mask)
        if backend == "triton":
            with_hole = torch.ones(2, 10, dtype=torch.long)
            with_hole[:, 4] = 0
            with pytest.raises(AttentionError, match="needs another one. Pad on the left"):
                compiled(IDS[:, :1], attention_mask=with_hole, past_key_values=caches[1])
    assert torch.equal(found, expected)
    assert counters["stats"]["unique_graphs"] > 0
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])
    ours, theirs = (paged_cache(cache).layers for cache in caches)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    for layer_idx, layer in ours.items():
        assert torch.equal(layer.dense(tables, 4), theirs[layer_idx].dense(tables, 4))
