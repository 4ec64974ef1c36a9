"""A damaged statistics file is one clear error, whatever is wrong with it."""

import json
import string
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from calib.errors import InputError
from calib.scalefiles.file_names import STATS_FILE
from calib.scales.observers import NUM_BINS
from calib.scales.stats import KVStats, LayerStats, TensorStats
from calib.scales.stats_file import load_progress, load_stats, save_stats

MODULE = {"layer_idx": 0, "tokens": 10}
FACTS = {"version": 1, "modules": {"a": MODULE}, "shared": {}, "progress": None}
OWNER = {"layer_idx": 1, "owner": "a"}


def tensors():
    """What one module has: K and V of two heads, Q of four, three channels."""
    found = {}
    for which, heads in (("k", 2), ("v", 2), ("q", 4)):
        for field in ("amax", "low", "high"):
            found[f"a.{which}.{field}"] = torch.ones(heads, 3)
        found[f"a.{which}.histogram"] = torch.ones(heads, NUM_BINS, dtype=torch.int64)
        found[f"a.{which}.total"] = torch.ones(heads, 3, dtype=torch.float64)
    return found


def load(path, facts=FACTS, **changes):
    """Save a file with some tensors changed (None: missing) and load it."""
    held = tensors() | {name.replace("_", "."): tensor for name, tensor in changes.items()}
    text = facts if isinstance(facts, str) else json.dumps(facts)
    held = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(held, path / STATS_FILE, {"fp8kv_stats": text})
    return load_progress(path / STATS_FILE)


def test_the_file_that_the_others_damage_is_whole(tmp_path):
    shared = {**FACTS, "shared": {"b": OWNER}, "progress": {"run": {}, "batches": 3}}
    stats, progress = load(tmp_path, shared)
    assert stats.layers["a"].k.total.shape == (2, 3)
    assert stats.shared["b"].owner == "a"
    assert progress == {"run": {}, "batches": 3}
    assert load_stats(tmp_path).tokens == 10


METADATA = {
    "no JSON": "{",
    "no object": "[1]",
    "a key twice": '{"version": 1, "version": 1}',
    "deep nesting": "[" * 100_000,
    "a long integer": '{"version": ' + "1" * 5000 + "}",
    "nothing": {},
    "another version": {**FACTS, "version": 2},
    "a version that only equals 1": {**FACTS, "version": True},
    "no modules": {k: v for k, v in FACTS.items() if k != "modules"},
    "no module": {**FACTS, "modules": {}},
    "modules in a list": {**FACTS, "modules": [MODULE]},
    "a module that is none": {**FACTS, "modules": {"a": None}},
    "no layer_idx": {**FACTS, "modules": {"a": {"tokens": 1}}},
    "layer_idx true": {**FACTS, "modules": {"a": {**MODULE, "layer_idx": True}}},
    "layer_idx negative": {**FACTS, "modules": {"a": {**MODULE, "layer_idx": -1}}},
    "no tokens": {**FACTS, "modules": {"a": {**MODULE, "tokens": 0}}},
    "tokens negative": {**FACTS, "modules": {"a": {**MODULE, "tokens": -1}}},
    "tokens in words": {**FACTS, "modules": {"a": {**MODULE, "tokens": "10"}}},
    "half a token": {**FACTS, "modules": {"a": {**MODULE, "tokens": 0.5}}},
    "more tokens than count": {**FACTS, "modules": {"a": {**MODULE, "tokens": 10**40}}},
    "a name of two lines": {**FACTS, "modules": {"a\nb": None}},
    "no shared": {k: v for k, v in FACTS.items() if k != "shared"},
    "shared without owner": {**FACTS, "shared": {"b": {"layer_idx": 1}}},
    "an unknown owner": {**FACTS, "shared": {"b": {**OWNER, "owner": "c"}}},
    "progress in a list": {**FACTS, "progress": [1]},
    "progress without batches": {**FACTS, "progress": {"run": {}}},
    "batches negative": {**FACTS, "progress": {"run": {}, "batches": -1}},
    "a run that is none": {**FACTS, "progress": {"run": 3, "batches": 1}},
    "a module without tensors": {**FACTS, "modules": {"a": MODULE, "b": MODULE}},
    "tensors without module": {**FACTS, "modules": {"b": MODULE}},
}
TENSORS = {
    "no amax": {"a_k_amax": None},
    "float64": {"a_v_amax": torch.ones(2, 3, dtype=torch.float64)},
    "flat": {"a_q_amax": torch.ones(12)},
    "no head": {"a_k_amax": torch.ones(0, 3)},
    "heads differ": {"a_v_amax": torch.ones(4, 3)},
    "a few bins": {"a_k_histogram": torch.ones(2, 3, dtype=torch.int64)},
    "bins of floats": {"a_k_histogram": torch.ones(2, NUM_BINS)},
    "a flat sum": {"a_k_total": torch.ones(6, dtype=torch.float64)},
    "extremes of more heads": {"a_k_low": torch.ones(4, 3)},
    "no lowest": {"a_k_low": None},
    "no sum": {"a_k_total": None},
    "a tensor of no module": {"c_k_amax": torch.ones(2, 3)},
}


@pytest.mark.parametrize("facts", METADATA.values(), ids=METADATA)
def test_damaged_metadata_is_one_clear_error(facts, tmp_path):
    refused(tmp_path, lambda: load(tmp_path, facts))


@pytest.mark.parametrize("changes", TENSORS.values(), ids=TENSORS)
def test_damaged_tensors_are_one_clear_error(changes, tmp_path):
    refused(tmp_path, lambda: load(tmp_path, **changes))


def refused(path, work):
    with pytest.raises(InputError) as caught:
        work()
    message = str(caught.value)
    assert str(path / STATS_FILE) in message
    assert "\n" not in message
    assert len(message) < 600


KEYS = st.sampled_from([*FACTS, *OWNER, "tokens", "a", "b", "run", "batches"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable, max_size=3)
    | st.sampled_from(["a", MODULE, OWNER]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(st.dictionaries(KEYS, VALUES).map(lambda changes: {**FACTS, **changes}))
@settings(max_examples=150, deadline=None)
def test_any_metadata_is_statistics_or_one_clear_error(tmp_path_factory, facts):
    path = tmp_path_factory.mktemp("fuzz")
    refusal, stats = None, None
    try:
        stats, _ = load(path, facts)
    except InputError as error:
        refusal = str(error)
    assert "\n" not in (refusal or "")
    assert refusal or type(stats.layers["a"].layer_idx) is int


def test_an_amax_below_zero_is_refused(tmp_path):
    negative = TensorStats(torch.full((2, 2), -1.0))
    layer = LayerStats(0, 1, *(replace(negative) for _ in "kvq"))
    save_stats(KVStats({"model.layers.0.self_attn": layer}), tmp_path / STATS_FILE)
    with pytest.raises(InputError, match="below zero"):
        load_stats(tmp_path)
