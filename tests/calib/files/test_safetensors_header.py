"""Safetensors headers: what safetensors writes is read back, what lies is one line."""

import json
import math
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from calib.errors import InputError
from calib.files.safetensors_header import MAX_HEADER_BYTES, read_header, read_values

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
VALUES = [0.02, 1.0, -3.5, 0.0, float("inf"), 1e-30]


def damaged(path, header, data=b"\0" * 8, *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def tensor(begin=0, end=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (1,), (6,), (3, 1, 2)])
def test_values_are_those_that_were_saved(dtype, shape, tmp_path):
    saved = torch.tensor(VALUES).to(dtype)[: math.prod(shape)].reshape(shape)
    save_file({"x": saved, "weight": torch.ones(5, 7)}, tmp_path / "x.safetensors", {"format": "pt"})
    entry = read_header(tmp_path / "x.safetensors")["x"]
    assert entry.shape == shape
    found = read_values(tmp_path / "x.safetensors", entry)
    assert found == saved.double().flatten().tolist()


def test_nan_stays_nan(tmp_path):
    save_file({"x": torch.tensor([float("nan")], dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    entry = read_header(tmp_path / "x.safetensors")["x"]
    assert math.isnan(read_values(tmp_path / "x.safetensors", entry)[0])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": tensor(0, 4)}, "4 bytes are not F32"),
        ({"x": tensor(), "y": tensor(4, 12)}, "overlap, or leave gaps"),
        ({"x": tensor(4, 12)}, "overlap, or leave gaps"),
        ({"x": tensor(0, 16, (4,))}, "end at .* of .* bytes"),
        ({"x": tensor(0, 0, (0,))}, "end at .* of .* bytes"),
        ({"x": tensor(shape=(-2,))}, "whole numbers"),
        ({"x": tensor(shape=(2.0,))}, "whole numbers"),
        ({"x": tensor(shape=(True, 2))}, "whole numbers"),
        ({"x": tensor(dtype="F33")}, "unknown type 'F33'"),
        ({"x": tensor(shape=[1] * 40 + [2])}, "41 dimensions"),
        ({"x": tensor(shape=(10**30,))}, "bytes are not"),
        ({"x": {"dtype": "F32"}}, "damaged: a tensor has a dtype, a shape and two data_offsets"),
        ({"x": [1]}, "damaged: a tensor has"),
        ({"x": tensor() | {"shape": 2}}, "damaged: a tensor has"),
        ({"x": tensor() | {"data_offsets": [0]}}, "damaged: a tensor has"),
        (b"[]", "must hold a JSON object, got list"),
        (b'{"x": 1, "x": 2}', "the key 'x' is there twice"),
        (b'{"x": NaN}', "NaN is not JSON"),
        (b'{"x": 1e999}', "beyond any float"),
        (b'{"x": ' + b"9" * 5000 + b"}", "is not JSON as every program reads it"),
        (b'{"x": "\xff"}', "is not JSON as every program reads it"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_lies_is_one_line(header, message, tmp_path):
    with pytest.raises(InputError, match=message) as error:
        read_header(damaged(tmp_path / "x.safetensors", header))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500 + len(str(tmp_path))


@pytest.mark.parametrize("length", [1000, MAX_HEADER_BYTES + 1, 2**63])
def test_a_header_longer_than_its_file_is_not_read(length, tmp_path):
    with pytest.raises(InputError, match="not a whole safetensors file"):
        read_header(damaged(tmp_path / "x.safetensors", {"x": tensor()}, length=length))


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_too_short_for_a_header_is_one_line(size, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(InputError, match="not a whole safetensors file"):
        read_header(tmp_path / "x.safetensors")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="is not a file"):
        read_header(tmp_path / "x.safetensors")


def test_a_scale_of_a_million_values_is_not_read(tmp_path):
    save_file({"x": torch.ones(1 << 20)}, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="1,048,576 values, too many"):
        read_values(tmp_path / "x.safetensors", read_header(tmp_path / "x.safetensors")["x"])


@pytest.mark.parametrize(
    ("dtype", "named"),
    [(torch.int32, "I32"), (torch.bool, "BOOL"), (torch.float8_e4m3fn, "F8_E4M3")],
)
def test_a_scale_of_another_type_is_refused_with_those_that_are_read(dtype, named, tmp_path):
    save_file({"x": torch.ones(1).to(dtype)}, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=f"type {named}; it must be F64, F32, F16, BF16$"):
        read_values(tmp_path / "x.safetensors", read_header(tmp_path / "x.safetensors")["x"])


def test_metadata_is_no_tensor(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "x": tensor()}
    path = damaged(tmp_path / "x.safetensors", header, struct.pack("<2f", 1, 2))
    assert read_values(path, read_header(path)["x"]) == [1, 2]
