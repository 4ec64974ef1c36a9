"""Damaged or dangerous model directories, and headers that lie, are refused before anything runs."""

import json
import math
import os

import pytest
import torch
from families import tiny_model
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.files.fingerprint import fingerprint, fingerprints
from calib.files.model_directory import open_model_directory
from calib.files.safetensors_header import MAX_HEADER_BYTES, read_header, read_values

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


VALUES = [0.02, 1.0, -3.5, 0.0, float("inf"), 1e-30]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


def damaged(path, header, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * 8)
    return path


def tensor(begin=0, end=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_are_those_that_were_saved(dtype, path):
    for shape in ((), (1,), (6,), (3, 1, 2)):
        saved = torch.tensor(VALUES).to(dtype)[: math.prod(shape)].reshape(shape)
        nan = torch.tensor([float("nan")], dtype=dtype)
        save_file({"x": saved, "nan": nan, "weight": torch.ones(5, 7)}, path, {"format": "pt"})
        header = read_header(path)
        assert header["x"].shape == shape
        assert read_values(path, header["x"]) == saved.double().flatten().tolist()
        assert math.isnan(read_values(path, header["nan"])[0])


def test_a_header_that_lies_is_one_line(path):
    for header, message in (
        ({"x": tensor(0, 4)}, "4 bytes are not F32"),
        ({"x": tensor(), "y": tensor(4, 12)}, "overlap, or leave gaps"),
        ({"x": tensor(0, 16, (4,))}, "end at .* of .* bytes"),
        ({"x": tensor(shape=(-2,))}, "whole numbers"),
        ({"x": tensor(shape=(True, 2))}, "whole numbers"),
        ({"x": tensor(dtype="F33")}, "unknown type 'F33'"),
        ({"x": tensor(shape=[1] * 32 + [2])}, "33 dimensions"),
        ({"x": tensor(shape=(10**30,))}, "bytes are not"),
        ({"x": {"dtype": "F32"}}, "damaged: a tensor has a dtype, a shape and two data_offsets"),
        ({"x": tensor() | {"data_offsets": [0]}}, "damaged: a tensor has"),
        (b"[]", "must hold a JSON object, got list"),
        (b'{"x": 1, "x": 2}', "the key 'x' is there twice"),
        (b'{"x": NaN}', "NaN is not JSON"),
        (b'{"x": 1e999}', "beyond any float"),
        (b'{"x": ' + b"9" * 5000 + b"}", "is not JSON as every program reads it"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ):
        with pytest.raises(InputError, match=message) as error:
            read_header(damaged(path, header))
        assert len(str(error.value)) < 500 + len(str(path))


def test_a_file_that_is_shorter_than_its_header_is_not_read(path):
    lengths = (1000, MAX_HEADER_BYTES + 1, 2**63)
    short = [damaged(path, {"x": tensor()}, length).read_bytes() for length in lengths]
    for content in (*short, b"", b"\0" * 7):
        path.write_bytes(content)
        with pytest.raises(InputError, match="not a whole safetensors file"):
            read_header(path)
    path.unlink()
    os.mkfifo(path)  # not waited for
    with pytest.raises(InputError, match="is not a file"):
        read_header(path)


def test_what_is_no_scale_is_not_read(path):
    def read(scale):
        save_file({"x": scale}, path)
        return read_values(path, read_header(path)["x"])

    assert len(read(torch.ones(1 << 16))) == 1 << 16
    for scale, message in (
        (torch.ones((1 << 16) + 1), "65,537 values, too many"),
        (torch.ones(1, dtype=torch.int32), "type I32; it must be F64, F32, F16, BF16$"),
        (torch.ones(1).to(torch.float8_e4m3fn), "type F8_E4M3; it must be"),
    ):
        with pytest.raises(InputError, match=message):
            read(scale)
