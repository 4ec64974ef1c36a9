"""When layers come one at a time, what is read and kept of them, and the memory that the whole job takes."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import calibrate, one_line_error
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from calib.errors import InputError
from calib.files.model_directory import open_model_directory
from calib.files.tensors import stored_tensors
from calib.files.text import parse_size, show_size
from calib.layerwise import memory
from calib.layerwise.hidden import HiddenStates, to_meta
from calib.layerwise.loop import scratch_directory
from calib.layerwise.memory import available_bytes
from calib.models.config import load_config
from calib.models.sources import find_model
from calib.recipe import load_recipe

GIB = 1 << 30


@pytest.fixture
def resolve(tiny_directory, monkeypatch):
    """What becomes of `offload` in a process of 1 GiB, on a machine that has 10 GiB left."""
    monkeypatch.setattr(memory, "resident_bytes", lambda: GIB)
    monkeypatch.setattr(memory, "available_bytes", lambda: 10 * GIB)

    def resolve(weights, config=None, **changes):
        monkeypatch.setattr(memory, "_weight_bytes", lambda *_: weights)
        recipe, checkpoint = load_recipe(None, {"device": "cpu", **changes}), find_model(str(tiny_directory))
        return memory.resolve_offload(checkpoint, config or load_config(checkpoint), recipe)

    return resolve


def test_auto_is_layerwise_where_weights_do_not_fit_or_it_is_refused(resolve, tiny_directory, tmp_path):
    for weights, changes, expected in (
        (5 * GIB, {}, "none"),
        (9.5 * GIB, {}, "layerwise"),
        (5 * GIB, {"max_memory": "6GiB"}, "layerwise"),
        (4 * GIB, {"max_memory": "6GiB"}, "none"),
        (50 * GIB, {"offload": "none"}, "none"),
        (1, {"offload": "layerwise"}, "layerwise"),
        (1 * GIB, {"data.dataset": "self"}, "none"),
    ):
        assert resolve(weights, **changes) == expected
    with pytest.raises(InputError, match="take 5.00GiB, too much for --max-memory 4GiB"):
        resolve(5 * GIB, offload="none", max_memory="4GiB")
    with pytest.raises(InputError, match="dataset 'self'.*builtin:python-docs"):
        resolve(50 * GIB, **{"data.dataset": "self"})
    config = load_config(find_model(str(tiny_directory)))
    config.quantization_config = {"quant_method": "fp8"}
    assert resolve(50 * GIB, config) == "none"
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--offload", "layerwise", "--resume")
    one_line_error(done, "saves no progress; leave --resume away")


def test_on_gpus_their_free_memory_counts(resolve, monkeypatch):
    monkeypatch.setattr(memory, "uses_gpu", lambda recipe: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (8 * GIB, 80 * GIB))
    # on their way weights take none of the machine's own memory
    assert [resolve(14 * GIB), resolve(15 * GIB)] == ["none", "layerwise"]
    assert resolve(5 * GIB, max_memory="4GiB") == "layerwise"


def test_converting_weights_needs_both(tiny_directory):
    checkpoint = find_model(str(tiny_directory))
    stored, config = (tiny_directory / "model.safetensors").stat().st_size, load_config(checkpoint)
    for dtype, needed in (("auto", stored), ("float32", stored), ("bfloat16", stored + stored // 2)):
        assert memory._weight_bytes(checkpoint, config, dtype) == needed


def test_sizes_are_read_and_shown_large_enough():
    texts = {"8GiB": 8 << 30, "500MB": 500_000_000, "1.5 gb": 1_500_000_000, "7B": 7}
    assert {text: parse_size(text) for text in texts} == texts
    shown = [show_size(size) for size in (1, 5 << 20, GIB + 1, 3 * GIB // 2)]
    assert shown == ["1MiB", "5MiB", "1.01GiB", "1.50GiB"]
    for text in ("8", "GiB", "-1GiB", "8 elephants", "0GiB", "1e9B", "8GiB!"):
        with pytest.raises(InputError, match=r"is not an amount of memory; .* such as 8GiB"):
            parse_size(text)
    with pytest.raises(InputError, match="max_memory"):
        load_recipe(None, {"max_memory": "8"})


def test_a_containers_limit_counts_on_every_level(tmp_path, monkeypatch):
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    for group, limit, usage in ((inner, "max", "0\nfile 9"), (inner.parent, 5000, "2000\nfile 2500")):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.stat").write_text(f"anon {usage}\n")
    (tmp_path / "self").write_text("0::/job/step\n")
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=8192))
    monkeypatch.setattr(memory, "_GROUP", tmp_path / "self")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    assert available_bytes() == 3000
    (inner.parent / "memory.max").write_text("50000\n")
    assert available_bytes() == 8192


def test_hidden_states_go_to_tmpdir_or_beside_the_output(tmp_path, monkeypatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    assert scratch_directory(tmp_path / "not" / "yet" / "there") == tmp_path
    monkeypatch.setenv("TMPDIR", "/somewhere")
    assert str(scratch_directory(tmp_path)) == "/somewhere"


# in a new process: a fork has free memory of its parent's, which is not counted
MEASURE = """
import sys
from pathlib import Path
from conftest import Saved
from calib.layerwise.loop import calibrate_layerwise
from calib.layerwise.memory import resident_bytes

saved = Saved(Path(sys.argv[1]), Path(sys.argv[1]))
source, before = saved.open(saved.recipe()), resident_bytes()
allowed, samples, tokens, size = map(int, sys.argv[2:])
batches = saved.batches([[7] * tokens] * samples, size)
calibrate_layerwise(source, batches, saved.recipe(), limit=before + allowed, directory=saved.path)
status = Path("/proc/self/status").read_text()
print(int(status.partition("VmHWM:")[2].split()[0]) * 1024 - before)
"""


def peak(directory, *numbers):
    """Bytes that a pass takes at most, beside what its process takes anyway."""
    command = [sys.executable, "-c", MEASURE, str(directory), *map(str, numbers)]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return int(subprocess.check_output(command, env=own))


def test_the_memory_limit_is_kept_by_weights(tmp_path):
    weights = write_llama(tmp_path, num_hidden_layers=12, hidden_size=1024, intermediate_size=2816)
    allowed = 110 << 20
    assert weights > 4 * allowed
    found = peak(tmp_path, allowed, 4, 16, 1)
    assert 2 * weights // 12 < found <= allowed  # two layers, one being read ahead


def test_the_memory_limit_is_kept_by_hidden_states(tmp_path):
    write_llama(tmp_path, num_hidden_layers=3, hidden_size=256, intermediate_size=64)
    allowed, samples, tokens = 64 << 20, 512, 128
    assert samples * tokens * 256 * 4 >= allowed
    slack = 16 << 20  # freed pages go back to the system a little later than new ones are taken
    assert peak(tmp_path, allowed, samples, tokens, 16) <= allowed + slack
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}


def write_llama(directory, **sizes):
    """Save a Llama of these sizes in small shards; return the bytes of its weights."""
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, vocab_size=100, **sizes)
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory, max_shard_size="50MB")
    return sum(weight.nbytes for weight in model.parameters())


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
