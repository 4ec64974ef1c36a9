"""Safetensors headers: what safetensors writes is read back, what lies is one line."""

import json
import math
import os

import pytest
import torch
from safetensors.torch import save_file

from calib.errors import InputError
from calib.files.safetensors_header import MAX_HEADER_BYTES, read_header, read_values

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
