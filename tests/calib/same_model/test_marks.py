"""Which rows of a weight are looked at, and what a calibration keeps of them."""

import json
from base64 import b64encode

import pytest

from calib.errors import InputError
from calib.files.model_directory import open_model_directory
from calib.same_model.check import ModelFacts, check_same_model
from calib.same_model.marks import Marks, sample_head_rows, sample_rows, settings_of, take_marks


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "grouped"),
    [
        pytest.param(71, 1, 64, False, id="Falcon 7B"),
        pytest.param(128, 8, 64, True, id="Falcon 40B"),
        pytest.param(48, 1, 128, False, id="StarCoder"),
        pytest.param(64, 64, 96, True, id="GPT-NeoX 20B"),
        pytest.param(40, 10, 128, False, id="Phi 4"),
        pytest.param(4, 2, 16, False, id="tiny"),
    ],
)
def test_keys_and_values_in_fused_weights(heads, kv_heads, head_dim, grouped):
    def letter(row):
        head, group = row // head_dim, heads // kv_heads + 2
        if grouped:
            return {group - 1: "v", group - 2: "k"}.get(head % group, "q")
        return "q" if head < heads else "k" if head < heads + kv_heads else "v"

    rows = (heads + 2 * kv_heads) * head_dim
    found = [letter(row) for row in sample_head_rows(rows, heads, head_dim)]
    assert min(found.count("k"), found.count("v")) >= 4
    assert len(found) <= 24


def test_every_head_of_eight_is_sampled_and_never_beyond_the_last_row():
    for head_dim in (64, 128):
        assert {row // head_dim for row in sample_rows(8 * head_dim, 8)} == {*range(8)}
    assert sample_rows(3, 8) == [0, 1, 2]


@pytest.fixture(scope="module")
def saved(model):
    modules = [f"model.layers.{i}.self_attn" for i in range(3)]
    return take_marks(open_model_directory(model), modules).model_dump()


def test_marks_are_the_same_from_json(saved):
    marks = Marks.from_json(json.loads(json.dumps(saved)), "")
    assert marks.model_dump() == saved
    assert (marks.layers, marks.version) == (3, 3)


def mark(values=bytes(128), **change):
    """Marks of one weight for K, of which one row was sampled."""
    text = b64encode(values).decode() if isinstance(values, bytes) else values
    return {"tensors": {"a.k_proj.weight": {"shape": [2, 2], "bits": 16, "values": text} | change}}


DAMAGE = {
    "layers in words": {"layers": "3"},
    "nothing of K and V": {"tensors": {}},
    "another version": {"version": 1},
    "no base 64": mark("?"),
    "empty": mark(b""),
    "infinite": mark(b"\x80\x7f" * 64),
    "cut off": mark(bytes(126)),
    "a number": mark(5),
    "17 bits": mark(bits=17),
    "of three dimensions": mark(shape=[2, 2, 2]),
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_damaged_marks_are_refused(change, saved):
    assert Marks.from_json(saved | mark(), "")
    with pytest.raises(InputError, match=r"^the marks in a file are damaged \(.+\)$") as found:
        Marks.from_json(saved | change, "a file")
    assert "pydantic" not in str(found.value)


def check_settings(model, path, change):
    """Compare the settings of a model's config with those after a change, as `fp8kv apply` does."""
    config = json.loads((model / "config.json").read_text())
    path.joinpath("config.json").write_text(json.dumps(config | change))
    one, other = settings_of(model, config), settings_of(path, config | change)
    check_same_model(ModelFacts("one", settings=one), ModelFacts("other", settings=other))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}},
            "rope_parameters {'",
        ),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-06, that of 'other' 1e-05"),
        ({"hidden_act": "relu"}, "hidden_act silu, that of 'other' relu"),
    ],
)
def test_settings_that_change_k_and_v_are_compared(change, key, model, tmp_path):
    with pytest.raises(InputError, match=f"'one' is of another model: its config says {key}"):
        check_settings(model, tmp_path, change)


def test_the_same_config_in_other_words_is_the_same(model, tmp_path):
    older = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None, "dtype": None}
    older |= {"use_cache": False, "eos_token_id": 7, "max_position_embeddings": 512}
    check_settings(model, tmp_path, older)
