"""Recorded decode steps: the model's own, bit for bit, and left to a model that cannot be recorded."""

import copy
import itertools
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
from fake_quant import scales_for
from families import PARALLEL, tiny_model
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf import fp8_attention, graph, rows
from fp8kv_runtime.kernels.launch import Launcher

LAUNCH = Launcher.__call__


class Recording(_python_dispatch.TorchDispatchMode):
    """What stands in for a CUDA graph: it does again what was done, on the same memory."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.calls, self.before = [], {}
        monkeypatch.setattr(Launcher, "__call__", lambda *arguments: self.launch(*arguments))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a graph cannot wait")
        self.calls.append((func, args, kwargs or {}, func(*args, **kwargs or {})))
        return self.calls[-1][3]

    def launch(self, launcher, target, grid, blocks, *arguments):
        with _python_dispatch._disable_current_modes():
            codes = blocks.codes.view(torch.uint8)
            self.before.setdefault(codes.data_ptr(), (codes, codes.clone()))
            LAUNCH(launcher, target, grid, blocks, *arguments)
        self.calls.append((LAUNCH, (launcher, target, grid, blocks, *arguments), {}, None))

    def end(self):
        """Take back what was stored: a graph does nothing while it is recorded."""
        for codes, before in self.before.values():
            codes.copy_(before)

    def replay(self):
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def replays(monkeypatch):
    """The replays of recordings, which this machine makes without a GPU."""
    replays = []

    def capture(run, device):
        recording = Recording(monkeypatch)
        with recording:
            output = run()
        monkeypatch.setattr(Launcher, "__call__", LAUNCH)
        recording.end()
        return lambda: replays.append(recording.replay()), output

    monkeypatch.setattr(rows, "_START_BLOCKS", 1)
    monkeypatch.setattr(graph, "capture", capture)
    return replays


def logits_of(
    model, monkeypatch, *, waits, padding=0, holes=0, backend="triton", before_step=None, num_scaled=None
):
    """Logits of eight steps after a prompt of twelve tokens: one block of 16 is filled up on the way."""
    monkeypatch.setattr(rows.CacheRows, "waits", lambda *_: waits)
    ids, positions, logits = torch.arange(3, 15)[None].repeat(2, 1), torch.arange(20)[None].repeat(2, 1), []
    mask = (torch.arange(20) >= torch.tensor([[padding], [0]])).long()
    mask[:, 18:] -= holes
    scales = scales_for(model, strategy="tensor")
    scales = replace(scales, layers=dict([*scales.layers.items()][:num_scaled]))
    with ExitStack() as block, torch.no_grad():
        block.enter_context(fp8_attention(model, scales, backend=backend, block_size=16))
        cache = model(ids, attention_mask=mask[:, :12], position_ids=positions[:, :12]).past_key_values
        for step in range(12, 20):
            if step == 15 and before_step == "another block":
                block.pop_all().close()
                block.enter_context(fp8_attention(model, scales, backend=backend, block_size=16))
            if step == 15 and before_step == "a copy":
                cache = copy.deepcopy(cache)
            if step == 15 and before_step == "a hook":
                block.callback(model.model.norm.register_forward_hook(lambda *args: 2 * args[2]).remove)
            if step == 15 and before_step == "other weights":
                norm = model.model.norm
                block.callback(setattr, norm, "weight", norm.weight)
                norm.weight = torch.nn.Parameter(2 * norm.weight)
            kwargs = {"position_ids": positions[:, step, None], "attention_mask": mask[:, : step + 1]}
            logits.append(model(ids[:, step - 12, None], past_key_values=cache, **kwargs).logits)
    return torch.cat(logits)


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_recorded_steps_are_the_models_own(attention, padding, replays, monkeypatch):
    model = tiny_model("llama", num_hidden_layers=1, attn_implementation=attention)
    expected = logits_of(model, monkeypatch, waits=False, padding=padding)
    assert not replays
    assert torch.equal(logits_of(model, monkeypatch, waits=True, padding=padding), expected)
    # the second step and, after the pool has grown, the sixth are recorded
    assert len(replays) == 4
    with pytest.raises(AttentionError, match="Pad on the left"):
        logits_of(model, monkeypatch, waits=True, padding=padding, holes=1)


@pytest.mark.parametrize("before_step", ["another block", "a copy", "a hook", "other weights"])
def test_what_happens_between_steps_is_not_missed(before_step, replays, monkeypatch):
    model = tiny_model("llama", num_hidden_layers=1)
    expected, recorded = (
        logits_of(model, monkeypatch, waits=waits, before_step=before_step) for waits in (False, True)
    )
    assert torch.equal(recorded, expected)
    assert replays


def waits_for_the_gpu(x, own):
    return own(x) * (float(x.detach()[0, 0, 0]) < torch.inf)


def misses_its_mask(x, own):
    if _python_dispatch._get_current_dispatch_mode():  # while it is recorded, which is done without one
        raise AttributeError("'NoneType' object has no attribute 'shape'")
    return own(x)


COUNT = itertools.count()
LLAMA4 = {"attention_chunk_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 2, "floor_scale": 16}
NOT_RECORDED = {
    "waits": ("llama", {}, "triton", waits_for_the_gpu),
    "misses its mask": ("llama", {}, "triton", misses_its_mask),
    "counts its calls": ("llama", {}, "triton", lambda x, own: own(x) * (1 + 0.1 * next(COUNT))),
    "torch": ("llama", {}, "torch", None),
    "keeps states": ("falcon_h1", PARALLEL["falcon_h1"], "triton", None),
    "layers without scales": ("llama", {"num_hidden_layers": 2}, "triton", None),
    "in chunks": ("llama4_text", LLAMA4, "triton", None),
}


@pytest.mark.parametrize("case", NOT_RECORDED)
def test_what_cannot_be_recorded_runs_itself(case, replays, monkeypatch):
    name, options, backend, forward = NOT_RECORDED[case]
    model, logits = tiny_model(name, **options), []
    if forward:
        norm = model.model.norm
        monkeypatch.setattr(norm, "forward", partial(forward, own=norm.forward))
    for waits in (False, True):
        num_scaled = 1 if case == "layers without scales" else None
        logits.append(logits_of(model, monkeypatch, waits=waits, backend=backend, num_scaled=num_scaled))
    counts = case == "counts its calls"
    assert (len(replays), torch.equal(*logits)) == (int(counts), not counts)  # a first replay is compared
