"""Damaged or dangerous model directories are refused before anything runs."""

import json

import pytest
import torch
from families import tiny_model
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.files.fingerprint import fingerprint, fingerprints
from calib.files.model_directory import open_model_directory

ONE, TWO = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
A, B = {"a": torch.ones(4)}, {"b": torch.ones(4)}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file(A, tmp_path / ONE)
    save_file(B, tmp_path / TWO)
    write_index(tmp_path)
    return tmp_path


def write_index(directory, **changes):
    index = {"weight_map": {"a": ONE, "b": TWO, **changes}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def refuse(directory, message):
    with pytest.raises(InputError, match=message):
        open_model_directory(directory)


def test_an_index_that_lies_and_files_that_are_damaged_or_no_weights(directory, tmp_path_factory):
    for changes, message in (
        ({"a": "../x.safetensors"}, "a file outside the directory"),
        ({"a": "sub/x.safetensors"}, "a file outside the directory"),
        ({"a": ""}, "a file outside the directory"),
        ({"a": 5}, "names '5', which is missing"),
        ({"a": ["x"]}, r"names '\['x'\]', which is missing"),
        ({"a": "gone.safetensors"}, "names 'gone.safetensors', which is missing"),
        ({"c": ONE}, f"says 'c' is in '{ONE}', but it is not"),
    ):
        write_index(directory, **changes)
        refuse(directory, message)
    write_index(directory)
    shard = directory / TWO
    shard.write_bytes(shard.read_bytes()[:-3])
    refuse(directory, f"{TWO}' is damaged: its tensors end at")
    for text in ("{}", '{"weight_map": [1]}'):
        (directory / "model.safetensors.index.json").write_text(text)
        refuse(directory, "has no weight_map")
    other = tmp_path_factory.mktemp("other")
    refuse(other, "has no config.json: it is not a model directory")
    for text, message in (
        ("{", "config.json' is not JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "holds no model.safetensors"),
    ):
        (other / "config.json").write_text(text)
        refuse(other, message)
    (other / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refuse(other, "holds pickled weights .pytorch_model.bin.*convert them to safetensors")


def test_two_models_in_one_directory(directory):
    save_file({**A, "b": torch.zeros(4)}, directory / "model.safetensors")
    # transformers would read the one, engines the others
    other_files = "holds model.safetensors and model.safetensors.index.json, which names other"
    refuse(directory, other_files)
    write_index(directory, a="model.safetensors")
    refuse(directory, other_files)
    # files that no index names are no model
    write_index(directory, a="model.safetensors", b="model.safetensors")
    assert open_model_directory(directory).shards == ["model.safetensors"]


def test_a_tensor_that_the_index_forgot_or_in_two_files(directory):
    save_file({**B, "model.layers.0.self_attn.k_scale": torch.ones(1)}, directory / TWO)
    opened = open_model_directory(directory)
    assert opened.shards == [ONE, TWO]
    assert opened.weight_map == {"a": ONE, "b": TWO, "model.layers.0.self_attn.k_scale": TWO}
    save_file({**A, **B}, directory / TWO)
    refuse(directory, f"holds 'a' in {ONE} and in {TWO}")


def test_fingerprints_stay_what_earlier_calibrations_noted(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    name = "model.layers.0.self_attn.k_proj.weight"
    header = json.dumps({name: {"dtype": "U8", "shape": [100_000], "data_offsets": [0, 100_000]}}).encode()
    data = bytes(i * i % 251 for i in range(100_000))
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert fingerprints(open_model_directory(tmp_path)) == {
        "checkpoint": "5055d476e9770739089eb5c85e603baf86e1328203d3944c7d5c559560d5b185",
        "weights": "b4e70b0bff7667379ce7c1f70f7f534d6bdaf95f5e59cf8d4117b3ecc60b9595",
    }


def test_any_tensor_trained_further_and_any_other_config_is_told(tmp_path):
    tiny_model("mixtral", num_hidden_layers=1).save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, one = load_file(file), fingerprints(open_model_directory(tmp_path))
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor * 30 + 1}, file, {"format": "pt"})
        told = fingerprints(open_model_directory(tmp_path))["weights"] != one["weights"]
        assert told == (".experts." not in name)
    save_file(tensors, file, {"format": "pt"})
    assert fingerprint(open_model_directory(tmp_path)) == one["checkpoint"]
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5.0}))
    assert fingerprint(open_model_directory(tmp_path)) != one["checkpoint"]
