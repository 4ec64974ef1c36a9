"""Recorded decode steps: the model's own, bit for bit, and left to a model that cannot be recorded."""

import itertools

import pytest
import torch
from fake_quant import scales_for
from families import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf import fp8_attention, graph, rows
from fp8kv_runtime.kernels.launch import Launcher

LAUNCH = Launcher.__call__


class Recording(TorchDispatchMode):
    """What stands in for a CUDA graph: it does again what was done, on the same memory."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.calls = []
        monkeypatch.setattr(Launcher, "__call__", lambda *arguments: self.launch(*arguments))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a graph cannot wait")
        self.calls.append((func, args, kwargs or {}, func(*args, **kwargs or {})))
        return self.calls[-1][3]

    def launch(self, *arguments):
        with _disable_current_modes():
            LAUNCH(*arguments)
        self.calls.append((LAUNCH, arguments, {}, None))

    def replay(self):
        for func, args, kwargs, out in list(self.calls):
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def replays(monkeypatch):
    """The replays of recordings, which this machine makes without a GPU."""
    replays = []

    def record(run, device):
        recording = Recording(monkeypatch)
        with recording:
            output = run()
        monkeypatch.setattr(Launcher, "__call__", LAUNCH)
        return lambda: replays.append(recording.replay()), output

    monkeypatch.setattr(rows, "_START_BLOCKS", 1)
    monkeypatch.setattr(graph, "record", record)
    return replays


def logits_of(model, monkeypatch, *, waits, padding=0, holes=0):
    """Logits of eight steps after a prompt of twelve tokens: one block of 16 is filled up on the way."""
    monkeypatch.setattr(rows.CacheRows, "waits", lambda *_: waits)
    ids, positions, logits = torch.arange(3, 15)[None].repeat(2, 1), torch.arange(20)[None].repeat(2, 1), []
    mask = (torch.arange(20) >= torch.tensor([[padding], [0]])).long()
    mask[:, 18:] -= holes
    with torch.no_grad(), fp8_attention(model, scales_for(model), backend="triton", block_size=16):
        cache = model(ids, attention_mask=mask[:, :12], position_ids=positions[:, :12]).past_key_values
        for step in range(12, 20):
            kwargs = {"position_ids": positions[:, step, None], "attention_mask": mask[:, : step + 1]}
            logits.append(model(ids[:, step - 12, None], past_key_values=cache, **kwargs).logits)
    return torch.cat(logits)


@pytest.mark.parametrize("padding", [0, 2])
def test_recorded_steps_are_the_models_own(padding, replays, monkeypatch):
    model = tiny_model("llama", num_hidden_layers=1)
    expected = logits_of(model, monkeypatch, waits=False, padding=padding)
    assert not replays
    assert torch.equal(logits_of(model, monkeypatch, waits=True, padding=padding), expected)
    # the second step and, after the pool has grown, the sixth are recorded
    assert len(replays) == 4
    with pytest.raises(AttentionError, match="Pad on the left"):
        logits_of(model, monkeypatch, waits=True, padding=padding, holes=1)


@pytest.mark.parametrize("change", ["waits for the GPU", "counts its calls", "is watched"])
def test_a_model_that_cannot_be_recorded_runs_itself(change, replays, monkeypatch):
    model, expected = tiny_model("llama", num_hidden_layers=1), []
    norm, count = model.model.norm, itertools.count()
    watch = norm.register_forward_hook(lambda *_: None) if change == "is watched" else None

    def forward(x, own=norm.forward):
        if change == "counts its calls":
            return own(x) * (1 + 0.1 * next(count))
        return own(x) * (float(x[0, 0, 0]) < torch.inf)

    if watch is None:
        monkeypatch.setattr(norm, "forward", forward)
    for waits in (False, True):
        count = itertools.count()
        expected.append(logits_of(model, monkeypatch, waits=waits))
    assert len(replays) == (change == "counts its calls")  # the first is compared
    if watch:
        watch.remove()
    if not replays:
        assert torch.equal(*expected)
