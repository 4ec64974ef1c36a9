"""`torch.compile(model)` on the FP8 cache: one graph for the decoder, the same text."""

import pytest
import torch
from fake_quant import scales_for
from families import FAMILIES, LATENT, tiny_model
from torch._dynamo.utils import counters
from transformers import DynamicCache

from fp8kv_runtime import ops
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf import fp8_attention, paged_cache

IDS = torch.tensor([[0, 0, 0, 5, 81, 7, 44, 9], [3, 99, 12, 6, 70, 8, 31, 20]])
MASK = (IDS != 0).long()
STEPS = 12
# the same float32 sums in another order; triton: of 22 bits
SAME = 1e-5


class Graphs:
    """A backend of torch.compile that keeps its graphs, and which of them have run."""

    def __init__(self):
        self.made, self.ran = [], []

    def __call__(self, graph, inputs):
        self.made.append(graph)

        def run(*inputs):
            self.ran.append(graph)
            return graph.forward(*inputs)

        return run


@pytest.fixture(autouse=True)
def nan_in_new_memory():
    """Nothing: torch.compile cannot trace what would stand in for `torch.empty`."""


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def graphs():
    return Graphs()


def greedy(call, cache, ids=IDS, mask=MASK, steps=STEPS, each=lambda: None):
    """Logits of a prompt's last token and of `steps` more; `each` is called after every pass."""
    logits = []
    for _ in range(steps + 1):
        padding = {} if mask is None else {"attention_mask": mask}
        logits.append(call(ids, past_key_values=cache, **padding).logits[:, -1])
        ids = logits[-1].argmax(-1)[:, None]
        mask = None if mask is None else torch.cat([mask, mask[:, -1:]], 1)
        each()
    return torch.stack(logits)


def operators(graph, name):
    """How often an operator is in a graph."""
    op = getattr(torch.ops.fp8kv, name)
    return len([n for n in graph.graph.nodes if n.target in (op, op.default)])


def of_ours():
    """Functions of ours that are kept out of graphs, of everything that broke one."""
    reasons = counters["graph_break"]
    assert all("torch.compiler.disable" in reason for reason in reasons)
    return {name for reason in reasons for name in ("_prepare", "_run_first") if name in reason}


@pytest.mark.parametrize(
    ("family", "backend", "padded"),
    [("llama", "torch", False), ("gemma2", "torch", True), ("llama", "triton", True),
     ("gpt_oss", "triton", False)],
)  # fmt: skip
def test_the_decoder_is_one_graph(family, backend, padded, graphs):
    model = tiny_model(family, **FAMILIES[family])
    scales, cache = scales_for(model), DynamicCache(config=model.config)
    ids, mask = (IDS, MASK) if padded else (IDS[1:], None)
    made, ran = [], []

    def note():
        made.append(len(graphs.made))
        ran.append(len(graphs.ran))

    with torch.no_grad(), fp8_attention(model, scales, backend=backend, block_size=1):
        expected = greedy(model, DynamicCache(config=model.config), ids, mask)
        found = greedy(torch.compile(model, backend=graphs), cache, ids, mask, each=note)
    torch.testing.assert_close(found, expected, rtol=0, atol=SAME)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert of_ours() == {"_prepare"}
    assert paged_cache(cache).num_blocks == 2 * len(ids) * 16  # it has grown
    assert made[-1] == made[-2] <= 6
    assert ran[-1] - ran[-2] == 2  # the decoder and the model's head
    layers = len(scales.layers)
    assert operators(graphs.ran[-2], "append_kv") == layers
    assert operators(graphs.ran[-2], "dense") == (layers if backend == "torch" else 0)
    assert operators(graphs.ran[-2], "decode_attention") == (layers if backend == "triton" else 0)


@pytest.mark.parametrize("options", [{"quantize_query": True}, {}], ids=["FP8 queries", "plain"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_functions_without_mutation_do_the_same(backend, options):
    model = tiny_model("llama")
    scales, caches = (
        scales_for(model, with_q=True),
        [DynamicCache(config=model.config) for _ in "ab"],
    )
    with torch.inference_mode(), fp8_attention(model, scales, backend=backend, **options):
        expected = greedy(model, caches[0], steps=3)
        found = greedy(torch.compile(model, backend="aot_eager"), caches[1], steps=3)
    torch.testing.assert_close(found, expected, rtol=0, atol=SAME)
    theirs, ours = (paged_cache(cache).layers for cache in caches)
    for layer_idx, layer in theirs.items():
        # uninitialised beyond the tokens
        tables = torch.zeros(1, 1, dtype=torch.int32)
        assert torch.equal(layer.dense(tables, 11), ours[layer_idx].dense(tables, 11))


def test_latents_too(graphs):
    model = tiny_model("deepseek_v3", **LATENT["deepseek_v3"])
    scales = scales_for(model)
    with torch.no_grad(), fp8_attention(model, scales, block_size=4):
        expected = greedy(model, DynamicCache(config=model.config), IDS[1:], None, steps=3)
        compiled = torch.compile(model, backend=graphs)
        found = greedy(compiled, DynamicCache(config=model.config), IDS[1:], None, steps=3)
    torch.testing.assert_close(found, expected, rtol=0, atol=SAME)
    assert of_ours() == {"_prepare"}


def test_only_the_first_prompt_is_not_compiled(graphs):
    model = tiny_model("llama")
    with torch.no_grad(), fp8_attention(model, scales_for(model), backend="triton", block_size=4):
        compiled = torch.compile(model, backend=graphs)
        first = compiled(IDS).logits
        assert not any(operators(graph, "extend_attention") for graph in graphs.made)
        second = compiled(IDS).logits
    assert of_ours() == {"_prepare", "_run_first"}
    assert operators(graphs.ran[-2], "extend_attention") == 3
    torch.testing.assert_close(second, first, rtol=0, atol=SAME)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_compiled_model_refuses_masks_too(compiler):
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), fp8_attention(model, scales_for(model), backend="triton"):
        compiled = torch.compile(model, backend=compiler)
        greedy(compiled, cache, steps=2)
        with_hole = torch.ones(2, 11, dtype=torch.long)
        with_hole[:, 4] = 0
        with pytest.raises(AttentionError, match="needs another one. Pad on the left"):
            compiled(IDS[:, :1], attention_mask=with_hole, past_key_values=cache)


def test_what_is_not_compiled_takes_no_operator(monkeypatch):
    for name in ("append_kv", "dense", "decode_attention", "extend_attention"):
        monkeypatch.setattr(ops, name, None)
    model = tiny_model("llama")
    for backend in ("torch", "triton"):
        with torch.no_grad(), fp8_attention(model, scales_for(model), backend=backend):
            greedy(model, DynamicCache(config=model.config), steps=1)
