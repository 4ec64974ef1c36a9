"""Statistics on disk: what is saved is loaded; a damaged file or calibration is one sentence, anywhere."""

import json
import shutil
import string
from contextlib import suppress

import pytest
import torch
from command_line import SMALL, fp8kv, one_line_error, ran
from families import edit_json, save_model, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.files.names import STATS_FILE
from calib.scales.observers import NUM_BINS
from calib.scales.places import BUCKETS, POSITION_BUCKETS
from calib.scales.scales import SharedAttention
from calib.scales.stats_file import load_progress, load_stats, open_calibration, save_stats
from calib.scales.tail import TAIL

MODULE = {"layer_idx": 0, "tokens": 10, "read": 12}
FACTS = {"version": 2, "modules": {"a": MODULE}, "shared": {}, "progress": None}
OWNER = {"layer_idx": 1, "owner": "a"}
PLACES = {"curve": BUCKETS, "positions": POSITION_BUCKETS, "tail": TAIL}


def in_bucket(bucket, count, value=1.0, heads=2):
    """Nothing but `value`, in one bucket of every head."""
    held = torch.zeros(heads, count)
    held[:, bucket] = value
    return held


def tensors():
    """What one module has: K and V of two heads, Q of four, three channels."""
    found = {}
    for which, heads in (("k", 2), ("v", 2), ("q", 4)):
        for field in ("amax", "low", "high"):
            found[f"a.{which}.{field}"] = torch.ones(heads, 3)
        found[f"a.{which}.histogram"] = torch.ones(heads, NUM_BINS, dtype=torch.int64)
        found[f"a.{which}.total"] = torch.ones(heads, 3, dtype=torch.float64)
    for which in "kv":
        for bucket, (field, count) in zip((3, 1, 0), PLACES.items(), strict=True):
            found[f"a.{which}.{field}"] = in_bucket(bucket, count)
    return found


def load(path, facts=FACTS, changes=None):
    """Save a file with some tensors changed (None: missing) and load it."""
    held = tensors() | (changes or {})
    text = facts if isinstance(facts, str) else json.dumps(facts)
    held = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(held, path / STATS_FILE, {"fp8kv_stats": text})
    return load_progress(path / STATS_FILE)


def test_a_file_gives_back_what_was_saved(tmp_path):
    stats, progress = load(tmp_path, {**FACTS, "shared": {"b": OWNER}, "progress": {"run": {}, "batches": 3}})
    assert progress == {"run": {}, "batches": 3}
    save_stats(stats, tmp_path / STATS_FILE)
    loaded = load_stats(tmp_path)
    assert (loaded.tokens, loaded.layers["a"].tokens_read) == (10, 12)
    assert loaded.shared == {"b": SharedAttention(1, "a")}
    assert loaded.layers["a"].k.total.dtype == torch.float64
    assert loaded.layers["a"].k.curve.nonzero().tolist() == [[0, 3], [1, 3]]
    saved, found = stats.tensors(), loaded.tensors()
    assert (len(found), saved.keys()) == (len(tensors()), found.keys())
    assert all(torch.equal(tensor, found[place]) for place, tensor in saved.items())


def test_a_file_that_holds_no_statistics_is_refused(tmp_path):
    for content in (None, b"junk"):
        if content:
            (tmp_path / STATS_FILE).write_bytes(content)
        with pytest.raises(InputError, match="cannot read statistics"):
            load_stats(tmp_path)
    stats, _ = load(tmp_path)
    for place in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(InputError, match="it is a folder, or its folder is not there"):
            save_stats(stats, place)


def with_module(**changes):
    return {**FACTS, "modules": {"a": {**MODULE, **changes}}}


METADATA = {
    "deep nesting": "[" * 100_000,
    "another version": {**FACTS, "version": 1},
    "a version that only equals 1": {**FACTS, "version": True},
    "no module": {**FACTS, "modules": {}},
    "layer_idx true": with_module(layer_idx=True),
    "layer_idx negative": with_module(layer_idx=-1),
    "no tokens": with_module(tokens=0),
    "more tokens than count": with_module(tokens=2**47, read=None),
    "fewer tokens read than counted": with_module(read=9),
    "more tokens than two runs have buckets": with_module(read=2**47),
    "a name of two lines": {**FACTS, "modules": {"a\nb": None}},
    "an unknown owner": {**FACTS, "shared": {"b": {**OWNER, "owner": "c"}}},
    "batches negative": {**FACTS, "progress": {"run": {}, "batches": -1}},
    "a module without tensors": {**FACTS, "modules": {"a": MODULE, "b": MODULE}},
}
PLAIN = {"a.k.amax": torch.ones(2, 3), "a.v.amax": torch.ones(2, 3), "a.q.amax": torch.ones(4, 3)}
TENSORS = {
    "float64": {"a.v.amax": torch.ones(2, 3, dtype=torch.float64)},
    "flat": {"a.q.amax": torch.ones(12)},
    "no head": {"a.k.amax": torch.ones(0, 3)},
    "heads differ": dict.fromkeys(tensors()) | PLAIN | {"a.v.amax": torch.ones(4, 3)},
    "amax below zero": {"a.q.amax": -torch.ones(4, 3)},
    "a few bins": {"a.k.histogram": torch.ones(2, 3, dtype=torch.int64)},
    "extremes of more heads": {"a.k.low": torch.ones(4, 3)},
    "no lowest": {"a.k.low": None},
    "a curve of float64": {"a.k.curve": in_bucket(3, BUCKETS).double()},
    "a curve below zero": {"a.k.curve": in_bucket(3, BUCKETS) - in_bucket(2, BUCKETS)},
    "a curve above amax": {"a.k.curve": in_bucket(3, BUCKETS, 2.0)},
    "a curve that is NaN": {"a.v.curve": in_bucket(3, BUCKETS, float("nan"))},
    "no positions": {"a.v.positions": None},
    "a tail below amax": {"a.k.tail": in_bucket(0, TAIL, 0.5)},
    "a tail in ascending order": {"a.k.tail": in_bucket(TAIL - 1, TAIL)},
    "places of K alone": {f"a.v.{field}": None for field in PLACES},
    "places of Q": {f"a.q.{field}": in_bucket(0, count, heads=4) for field, count in PLACES.items()},
    "a tensor of no module": {"c.k.amax": torch.ones(2, 3)},
    "a latent of two heads": dict.fromkeys(tensors())
    | {name.replace(".k.", ".latent.").replace(".v.", ".k_pe."): x for name, x in PLAIN.items()},
}
DAMAGE = {name: (facts, None) for name, facts in METADATA.items()}
DAMAGE |= {name: (FACTS, changes) for name, changes in TENSORS.items()}


@pytest.mark.parametrize(("facts", "changes"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_statistics_are_one_clear_error(facts, changes, tmp_path):
    with pytest.raises(InputError) as caught:
        load(tmp_path, facts, changes)
    message = str(caught.value)
    assert str(tmp_path / STATS_FILE) in message
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
    with suppress(InputError):
        stats, _ = load(tmp_path_factory.mktemp("fuzz"), facts)
        assert type(stats.layers["a"].layer_idx) is int


STATS, REPORT, K = "fp8kv_stats.safetensors", "fp8kv_calibration.json", "model.layers.1.self_attn.k."
NAN = "model.layers.1.self_attn K: NaN or Inf was seen"
NOT_SUMMED_UP = f"are not those that its {REPORT} sums up"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    model = save_model(tiny_model("llama", num_hidden_layers=2), root / "model")
    for name, seed in {"one": 0, "other": 7}.items():
        ran("calibrate", model, "-o", root / name, *SMALL, "--seed", seed)
    return root


def channel(value):
    """Put `value` into a channel of K, in its amax and wherever that is repeated."""

    def damage(directory):
        with safe_open(directory / STATS, "pt") as file:
            facts = file.metadata()
        tensors = load_file(directory / STATS)
        for field in ("amax", "curve", "tail", "positions"):
            tensor = tensors[f"{K}{field}"]
            tensor[0, tensor[0].argmax()] = value
        save_file(tensors, directory / STATS, facts)

    return damage


def report(text):
    return lambda directory: (directory / REPORT).write_text(text)


def edited(**changes):
    return lambda directory: edit_json(directory / REPORT, **changes)


DAMAGED = {
    "an infinite channel": (channel(float("inf")), NAN),
    "NaN": (channel(float("nan")), NAN),
    "of another run": (lambda path: shutil.copy(path.parent / "other" / STATS, path), NOT_SUMMED_UP),
    "no report": (report(""), "is not JSON"),
    "a report in a list": (report("[{}]"), "must hold a JSON object"),
    "a report of nothing": (report("{}"), "is not of this version"),
    "layers of strings": (edited(layers=["a"]), "does not say what was calibrated"),
    "another version": (edited(fp8kv_calibration=2), "not of this version of fp8kv"),
    "no checkpoint": (edited(measured_on={"model": "m"}), r"calibrated \(measured_on.checkpoint: "),
    "one warning": (edited(warnings="none"), r"what was calibrated \(warnings: "),
    "no source": (edited(dataset={}), r"what was calibrated \(dataset.source: "),
}


@pytest.fixture
def stats(made, tmp_path):
    shutil.copytree(made / "other", tmp_path / "other")
    return shutil.copytree(made / "one", tmp_path / "stats")


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_calibration_is_one_sentence(damage, message, stats):
    damage(stats)
    with pytest.raises(InputError, match=message):
        assert open_calibration(stats).stats


def test_every_command_refuses_it(made, stats, tmp_path):
    for command in (
        "verify ONE --against STATS",
        "repair ONE --stats STATS -o OUT",
        "apply STATS MODEL -o OUT",
        "pack STATS -o OUT",
        "merge STATS OTHER -o OUT",
        "bake MODEL --scales STATS --for fp8 -o OUT",
        "eval MODEL --scales STATS -o OUT --dataset random --samples 2 --seq-len 32 --device cpu",
    ):
        places = {"STATS": stats, "OUT": tmp_path / "out"}
        places |= {name.upper(): made / name for name in ("one", "other", "model")}
        for name in ("of another run", "NaN", "no report"):
            damage, message = DAMAGED[name]
            damage(stats)
            one_line_error(fp8kv(*[places.get(word, word) for word in command.split()]), message)
            assert not (tmp_path / "out").exists()
            shutil.copytree(made / "one", stats, dirs_exist_ok=True)
