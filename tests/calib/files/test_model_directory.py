"""Damaged or dangerous model directories are refused before anything runs."""

import json

import pytest
import torch
from families import tiny_model
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.files.fingerprint import fingerprint, fingerprints
from calib.files.model_directory import open_model_directory


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(4)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(4)}, tmp_path / "model-00002-of-00002.safetensors")
    write_index(tmp_path)
    return tmp_path


def write_index(directory, **changes):
    weight_map = {f: f"model-0000{i}-of-00002.safetensors" for i, f in ((1, "a"), (2, "b"))}
    index = {"weight_map": {**weight_map, **changes}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_whole_checkpoint_opens(directory):
    opened = open_model_directory(directory)
    assert opened.shards == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert opened.weight_map["b"] == "model-00002-of-00002.safetensors"


def test_a_single_file_needs_no_index(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"x": 1}}')
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    opened = open_model_directory(tmp_path)
    assert opened.weight_map == {"a": "model.safetensors"}
    assert opened.text_config == {"x": 1}


def refuse(directory, message):
    with pytest.raises(InputError, match=message):
        open_model_directory(directory)


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/etc/passwd", "sub/x.safetensors", ".."])
def test_an_index_that_names_files_outside_the_directory(directory, shard):
    write_index(directory, a=shard)
    refuse(directory, "a file outside the directory")


def test_an_index_that_names_a_missing_file(directory):
    write_index(directory, a="gone.safetensors")
    refuse(directory, "names 'gone.safetensors', which is missing")


def test_an_index_that_lies_about_a_tensor(directory):
    write_index(directory, c="model-00001-of-00002.safetensors")
    refuse(directory, "says 'c' is in 'model-00001-of-00002.safetensors', but it is not")


def test_an_index_without_a_weight_map(directory):
    (directory / "model.safetensors.index.json").write_text("{}")
    refuse(directory, "has no weight_map")


def test_a_truncated_file(directory):
    shard = directory / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    refuse(directory, "model-00002-of-00002.safetensors' is damaged: its tensors end at")


def test_a_header_that_lies_about_its_data(directory):
    header = json.dumps({"b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}}).encode()
    shard = directory / "model-00002-of-00002.safetensors"
    shard.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    refuse(directory, "the header of .*model-00002-of-00002.safetensors' is damaged")


def test_pickled_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refuse(tmp_path, "holds pickled weights .pytorch_model.bin.*convert them to safetensors")


def test_no_weights_no_config_no_json(tmp_path):
    refuse(tmp_path, "has no config.json: it is not a model directory")
    (tmp_path / "config.json").write_text("{}")
    refuse(tmp_path, "holds no model.safetensors")
    (tmp_path / "config.json").write_text("{")
    refuse(tmp_path, "config.json' is not JSON")
    (tmp_path / "config.json").write_text("[]")
    refuse(tmp_path, "must hold a JSON object, got list")


def test_fingerprints_tell_revisions_apart(tiny_llama, tmp_path):
    tiny_llama.save_pretrained(tmp_path / "one")
    tiny_llama.save_pretrained(tmp_path / "same")
    one, same = (fingerprint(open_model_directory(tmp_path / name)) for name in ("one", "same"))
    assert one == same
    tensors = load_file(tmp_path / "same/model.safetensors")
    trained = {name: tensor + 0.5 for name, tensor in tensors.items()}
    save_file(trained, tmp_path / "same/model.safetensors", {"format": "pt"})
    assert fingerprint(open_model_directory(tmp_path / "same")) != one
    config = json.loads((tmp_path / "one/config.json").read_text())
    (tmp_path / "one/config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    assert fingerprint(open_model_directory(tmp_path / "one")) != one


def test_any_tensor_trained_further_is_told(tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, one = load_file(file), fingerprints(open_model_directory(tmp_path))["weights"]
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor * 30 + 1}, file, {"format": "pt"})
        told = fingerprints(open_model_directory(tmp_path))["weights"] != one
        assert told == (".experts." not in name)


def test_a_single_file_beside_an_index_that_does_not_name_it(directory):
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, directory / "model.safetensors")
    # transformers would read the one, engines the others
    refuse(directory, "holds model.safetensors and model.safetensors.index.json, which names other")


def test_an_index_that_names_the_single_file_and_another(directory):
    save_file({"a": torch.zeros(4)}, directory / "model.safetensors")
    write_index(directory, a="model.safetensors")
    refuse(directory, "holds model.safetensors and model.safetensors.index.json, which names other")


def test_an_index_of_a_single_file_and_files_that_no_index_names(directory):
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, directory / "model.safetensors")
    save_file({"a": torch.ones(4)}, directory / "consolidated.safetensors")
    write_index(directory, a="model.safetensors", b="model.safetensors")
    assert open_model_directory(directory).shards == ["model.safetensors"]


def test_a_tensor_in_two_files(directory):
    save_file({"a": torch.zeros(4), "b": torch.ones(4)}, directory / "model-00002-of-00002.safetensors")
    refuse(directory, "holds 'a' in model-00001-of-00002.* and in model-00002-of-00002.safetensors")


def test_a_tensor_that_the_index_forgot_is_known(directory):
    file = directory / "model-00002-of-00002.safetensors"
    save_file({"b": torch.ones(4), "model.layers.0.self_attn.k_scale": torch.ones(1)}, file)
    assert open_model_directory(directory).weight_map["model.layers.0.self_attn.k_scale"] == file.name
