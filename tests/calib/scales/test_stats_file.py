"""A damaged statistics file is one clear error, whatever is wrong with it."""

import json
import string
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from calib.errors import InputError
from calib.files.names import STATS_FILE
from calib.scales.observers import NUM_BINS
from calib.scales.places import BUCKETS, POSITION_BUCKETS
from calib.scales.stats import KVStats, LayerStats, TensorStats
from calib.scales.stats_file import load_progress, load_stats, save_stats
from calib.scales.tail import TAIL

MODULE = {"layer_idx": 0, "tokens": 10, "read": 12}
FACTS = {"version": 2, "modules": {"a": MODULE}, "shared": {}, "progress": None}
OWNER = {"layer_idx": 1, "owner": "a"}


def tensors():
    """What one module has: K and V of two heads, Q of four, three channels."""
    found = {}
    for which, heads in (("k", 2), ("v", 2), ("q", 4)):
        for field in ("amax", "low", "high"):
            found[f"a.{which}.{field}"] = torch.ones(heads, 3)
        found[f"a.{which}.histogram"] = torch.ones(heads, NUM_BINS, dtype=torch.int64)
        found[f"a.{which}.total"] = torch.ones(heads, 3, dtype=torch.float64)
    for which in "kv":
        found[f"a.{which}.curve"] = in_bucket(3, BUCKETS)
        found[f"a.{which}.positions"] = in_bucket(1, POSITION_BUCKETS)
        found[f"a.{which}.tail"] = in_bucket(0, TAIL)
    return found


def in_bucket(bucket, count, value=1.0, heads=2):
    """Nothing but `value`, in one bucket of every head."""
    held = torch.zeros(heads, count)
    held[:, bucket] = value
    return held


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
    assert stats.layers["a"].tokens_read == 12
    assert stats.layers["a"].k.curve.nonzero().tolist() == [[0, 3], [1, 3]]


OLD = {**FACTS, "version": 1, "modules": {"a": {"layer_idx": 0, "tokens": 10}}}


def test_a_file_of_version_1_is_read_and_written_as_version_2(tmp_path):
    new = [f"a_{which}_{field}" for which in "kv" for field in ("curve", "positions", "tail")]
    stats, _ = load(tmp_path, OLD, **dict.fromkeys(new))
    assert stats.layers["a"].tokens_read == stats.tokens == 10
    assert stats.layers["a"].k.curve is stats.layers["a"].k.tail is None
    save_stats(stats, tmp_path / "again.safetensors")
    again = load_stats(tmp_path / "again.safetensors")
    assert stats.tensors().keys() == again.tensors().keys()
    with safe_open(tmp_path / "again.safetensors", "pt") as file:
        assert json.loads(file.metadata()["fp8kv_stats"])["version"] == 2


def test_nan_of_a_head_is_nan_in_its_places(tmp_path):
    bad = torch.ones(2, 3)
    bad[0, 0] = float("nan")
    held = {
        "curve": in_bucket(3, BUCKETS),
        "positions": in_bucket(1, POSITION_BUCKETS),
        "tail": in_bucket(0, TAIL),
    }
    for each in held.values():
        each[0, each[0].argmax()] = float("nan")
    stats, _ = load(tmp_path, a_k_amax=bad, **{f"a_k_{name}": x for name, x in held.items()})
    assert stats.layers["a"].k.curve[0, 3].isnan()


METADATA = {
    "no JSON": "{",
    "no object": "[1]",
    "a key twice": '{"version": 1, "version": 1}',
    "deep nesting": "[" * 100_000,
    "a long integer": '{"version": ' + "1" * 5000 + "}",
    "nothing": {},
    "another version": {**FACTS, "version": 3},
    "no version": {**FACTS, "version": 0},
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
    "fewer tokens read than counted": {**FACTS, "modules": {"a": {**MODULE, "read": 9}}},
    "half a token": {**FACTS, "modules": {"a": {**MODULE, "tokens": 0.5}}},
    "more tokens than count": {**FACTS, "modules": {"a": {**MODULE, "tokens": 10**40}}},
    "more tokens than two runs have buckets": {
        **FACTS,
        "modules": {"a": {**MODULE, "read": 2**47}},
    },
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
    "a curve of other heads": {"a_k_curve": in_bucket(3, BUCKETS, heads=4)},
    "a curve of few buckets": {"a_k_curve": in_bucket(1, 3)},
    "a curve of float64": {"a_k_curve": in_bucket(3, BUCKETS).double()},
    "a curve below zero": {"a_k_curve": in_bucket(3, BUCKETS) - in_bucket(2, BUCKETS)},
    "a curve above amax": {"a_k_curve": in_bucket(3, BUCKETS, 2.0)},
    "a curve below amax": {"a_v_curve": in_bucket(3, BUCKETS, 0.5)},
    "a curve that is NaN": {"a_v_curve": in_bucket(3, BUCKETS, float("nan"))},
    "a curve that is infinite": {"a_v_curve": in_bucket(3, BUCKETS, float("inf"))},
    "no curve": {"a_k_curve": None},
    "no positions": {"a_v_positions": None},
    "positions below amax": {"a_v_positions": in_bucket(0, POSITION_BUCKETS, 0.5)},
    "positions by head and channel": {"a_v_positions": torch.ones(2, 3)},
    "a tail below amax": {"a_k_tail": in_bucket(0, TAIL, 0.5)},
    "a tail in ascending order": {"a_k_tail": in_bucket(TAIL - 1, TAIL)},
    "a short tail": {"a_k_tail": in_bucket(0, 3)},
    "no tail": {"a_v_tail": None},
    "places of K alone": {"a_v_curve": None, "a_v_positions": None, "a_v_tail": None},
    "places of Q": {
        "a_q_curve": in_bucket(3, BUCKETS, heads=4),
        "a_q_positions": in_bucket(3, POSITION_BUCKETS, heads=4),
        "a_q_tail": in_bucket(0, TAIL, heads=4),
    },
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
