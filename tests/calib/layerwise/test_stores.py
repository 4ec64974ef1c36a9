"""Reading single tensors, and keeping outputs in memory and on disk."""

import resource

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from calib.errors import InputError
from calib.files.model_directory import open_model_directory
from calib.files.tensors import stored_tensors
from calib.layerwise.hidden import HiddenStates, to_meta
from calib.models.sources import find_model

CPU = torch.device("cpu")
TENSORS = {
    "a": torch.arange(35, dtype=torch.float32).view(5, 7),
    "b": torch.arange(-3, 3, dtype=torch.bfloat16),
    "c": torch.tensor(2.5, dtype=torch.float64),
    "e": torch.zeros(0, 4),
    "f": torch.tensor([1, 2, 3], dtype=torch.uint8),
}


@pytest.fixture
def checkpoint(tiny_directory):
    save_file(TENSORS, tiny_directory / "model.safetensors", {"format": "pt"})
    return find_model(str(tiny_directory))


def test_tensors_are_read_as_safetensors_reads_them_and_damage_is_one_line(checkpoint):
    stored = stored_tensors(checkpoint)
    assert stored.keys() == TENSORS.keys()
    with safe_open(checkpoint.path / "model.safetensors", framework="pt") as file:
        for name, tensor in TENSORS.items():
            read = stored[name].read()
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)
            # float32 matrix products differ in their last bits between alignments
            mapped = file.get_slice(name)[...] if tensor.dim() else read
            assert not tensor.numel() or (read.data_ptr() - mapped.data_ptr()) % 64 == 0
    memory = torch.full((stored["a"].room,), 7, dtype=torch.uint8)  # that is given
    read = stored["a"].read(memory)
    assert torch.equal(read, TENSORS["a"])
    assert read.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    path, stored = checkpoint.path / "model.safetensors", stored_tensors(checkpoint)
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(InputError, match="ends early; download the model again"):
        for tensor in stored.values():
            tensor.read()
    path.write_bytes(data.replace(b'"dtype":"BF16"', b'"dtype": "U16"'))
    with pytest.raises(InputError, match=r"holds 'b' as U16.*--offload none"):
        stored_tensors(open_model_directory(checkpoint.path))


@pytest.mark.parametrize("room", [0, 10_000])
def test_outputs_come_back_as_they_were(room, tmp_path):
    output = (torch.randn(2, 5).T, None, torch.arange(3), torch.randn(4, 5)[:, 1:3].bfloat16())
    with HiddenStates(tmp_path, room) as store:
        store.put(("hidden", 0), output)
        for give in (store.get, store.take):
            for x, y in zip(give(("hidden", 0), CPU), output, strict=True):
                assert (x is None) == (y is None)
                assert x is None or (x.dtype == y.dtype and torch.equal(x, y))
                assert x is None or x.stride() in (y.stride(), torch.empty_like(y).stride())
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_within_a_file_is_an_error_of_one_line(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        said = "File too large; set TMPDIR"
        with HiddenStates(tmp_path, 0) as store, pytest.raises(InputError, match=said):
            store.put(("hidden", 0), torch.zeros(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_room_in_memory_is_used_again(tmp_path):
    kilobyte = torch.zeros(1024, dtype=torch.uint8)
    form, nothing = to_meta((kilobyte, None))
    assert (form.is_meta, form.shape, nothing) == (True, kilobyte.shape, None)
    with HiddenStates(tmp_path, 1500) as store:
        store.put(("hidden", 0), kilobyte)
        store.put(("hidden", 1), kilobyte)
        assert len(list(tmp_path.rglob("hidden-*"))) == 1
        store.take(("hidden", 0), CPU)
        store.put(("hidden", 2), kilobyte)
        assert len(list(tmp_path.rglob("hidden-*"))) == 1
