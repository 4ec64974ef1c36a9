"""Damaged or dangerous model directories, headers that lie, paths that lead nowhere: what the error says."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error, ran, succeeded
from families import tiny_model
from safetensors.torch import load_file, save_file

from calib.data.loading import dataset_key
from calib.errors import InputError
from calib.files.cache_folder import cache_folder
from calib.files.fingerprint import fingerprint, fingerprints
from calib.files.model_directory import open_model_directory
from calib.files.safetensors_header import MAX_HEADER_BYTES, read_header, read_values
from calib.files.stored_scales import read_scales
from calib.formats.directory import local_directory
from calib.transfer.hidden_paths import _spellings

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
    refuse(directory, f"{TWO}' is cut short: it has ")
    for text in ("{}", '{"weight_map": [1]}'):
        (directory / "model.safetensors.index.json").write_text(text)
        refuse(directory, "has no weight_map")
    other = tmp_path_factory.mktemp("other")
    refuse(other, "has no config.json: it is not a model directory")
    for path in (Path("builtin:smollm2"), other / "gone"):
        refuse(path, f"^'{path}' is not a directory; give one that holds a model$")
    for text, message in (
        ("{", "config.json' is not JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "holds no model.safetensors"),
    ):
        (other / "config.json").write_text(text)
        refuse(other, message)
    scales = {"weight_map": {"model.layers.0.self_attn.k_scale": "kv_cache_scales.safetensors"}}
    (other / "model.safetensors.index.json").write_text(json.dumps(scales))
    with pytest.raises(InputError, match="index.json' names scales alone, which are missing, and "):
        open_model_directory(other, needs_scales=False)
    (other / "model.safetensors.index.json").unlink()
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
        ({"x": tensor(0, 16, (4,))}, "is cut short: it has .* of .* bytes"),
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
        with pytest.raises(InputError, match="is damaged or incomplete: it has "):
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


FORMATS = ("vllm", "tgi", "json", "fp8kv")
NOWHERE = "~nobody-of-this-name/x"


@pytest.fixture(scope="module")
def several(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrated") / "several"
    succeeded(calibrate(model, "-o", out, *(f"--format={name}" for name in FORMATS)))
    return out


def test_the_directories_of_several_formats_are_named(several, model, tmp_path):
    places = {"DIR": several, "ONE": several / "vllm", "OUT": tmp_path / "out", "MODEL": model}
    inside = [f"'{several / name}'" for name in FORMATS]
    for command in (
        "inspect DIR",
        "verify ONE --against DIR",
        "compare DIR ONE",
        "merge ONE DIR -o OUT",
        "repair ONE --stats DIR -o OUT",
        "convert DIR --to tgi -o OUT",
        "generate MODEL w5 --scales DIR",
        "eval MODEL --scales DIR",
        "calibrate DIR -o OUT",
    ):
        done = fp8kv(*(places.get(word, word) for word in command.split()))
        one_line_error(done, f"'{several}' ", "several formats", f"give {', '.join(inside)}")
    assert not (tmp_path / "out").exists()


def test_scales_without_weights_are_told_from_no_model(several, model, tmp_path):
    out, new, empty = several / "fp8kv", tmp_path / "new", tmp_path / "empty"
    recipe = out / "fp8kv_calibration.json"
    for command in (("convert", out, "--to", "vllm"), ("repair", out, "--stats", out), ("strip", out)):
        said = f"fp8kv calibrate MODEL --recipe {recipe} --format"
        one_line_error(fp8kv(*command, "-o", new), f"'{out}' holds a calibration and no model", said)
    ran("calibrate", model, "--recipe", recipe, "--format", "vllm", "--device", "cpu", "-o", new)
    empty.mkdir()
    done = fp8kv("convert", empty, "--to", "tgi", "-o", tmp_path / "out")
    one_line_error(done, f"'{empty}' has no config.json: it is not a model directory")
    (empty / "vllm").mkdir()  # no calibration
    done = fp8kv("inspect", empty)
    one_line_error(done, "holds no model")
    assert "formats" not in done.stderr


def test_a_json_file_alone_is_converted_beside_a_model(model, several, tmp_path):
    alone, both = tmp_path / "alone", shutil.copytree(model, tmp_path / "both")
    alone.mkdir()
    for directory in (alone, both):
        shutil.copy(several / "json" / "kv_cache_scales.json", directory)
    done = fp8kv("convert", alone, "--to", "tgi", "-o", tmp_path / "out")
    one_line_error(done, "holds kv_cache_scales.json and no model", "copy of the model's directory")
    ran("convert", both, "--to", "tgi", "-o", tmp_path / "out")  # and so it is
    factors = json.loads((both / "kv_cache_scales.json").read_text())["kv_cache"]["scaling_factor"]["0"]
    found = [layer.k[0] for layer in read_scales(tmp_path / "out").layers]
    assert found == pytest.approx([*factors.values()])


def test_a_user_without_a_home_is_one_line(model, monkeypatch, tmp_path):
    for command in (
        ("calibrate", model, "-o", tmp_path / "out", "--dataset", NOWHERE),
        ("apply", NOWHERE, model, "-o", tmp_path / "out"),
        ("bench", NOWHERE),
        ("eval", model, "-o", tmp_path / "out", "--tasks", f"{NOWHERE}.yaml"),
    ):
        one_line_error(fp8kv(*command), f"'{NOWHERE}", "this user has no home folder; give a full path")
    assert not (tmp_path / "out").exists()
    for function in (dataset_key, local_directory):
        with pytest.raises(InputError, match="this user has no home folder"):
            function(NOWHERE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", NOWHERE)
    assert cache_folder("HF_HUB_CACHE") == tmp_path / NOWHERE
    assert _spellings(NOWHERE) == [NOWHERE]
