"""When layers come one at a time, and which memory a size names."""

import mmap
from types import SimpleNamespace

import pytest
import torch

from calib.errors import InputError
from calib.files.text import parse_size, show_size
from calib.layerwise import memory
from calib.layerwise.loop import scratch_directory
from calib.layerwise.memory import available_bytes, resident_bytes
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


@pytest.mark.parametrize(
    ("weights", "changes", "expected"),
    [
        (5 * GIB, {}, "none"),
        (9.5 * GIB, {}, "layerwise"),
        (5 * GIB, {"max_memory": "6GiB"}, "layerwise"),
        (4 * GIB, {"max_memory": "6GiB"}, "none"),
        (50 * GIB, {"offload": "none"}, "none"),
        (1, {"offload": "layerwise"}, "layerwise"),
        (1 * GIB, {"data.dataset": "self"}, "none"),
    ],
)
def test_auto_is_layerwise_where_the_weights_do_not_fit(weights, changes, expected, resolve):
    assert resolve(weights, **changes) == expected


def test_what_cannot_stay_in_memory_and_must_is_refused(resolve):
    with pytest.raises(InputError, match="take 5.00GiB, too much for --max-memory 4GiB"):
        resolve(5 * GIB, offload="none", max_memory="4GiB")
    with pytest.raises(InputError, match="dataset 'self'.*builtin:python-docs"):
        resolve(50 * GIB, **{"data.dataset": "self"})


def test_quantised_weights_stay_in_memory_unless_told_otherwise(resolve, tiny_directory):
    config = load_config(find_model(str(tiny_directory)))
    config.quantization_config = {"quant_method": "fp8"}
    assert resolve(50 * GIB, config) == "none"


@pytest.mark.parametrize(
    ("weights", "changes", "expected"),
    [
        (14 * GIB, {}, "none"),  # on its way it takes none of the machine's own memory
        (15 * GIB, {}, "layerwise"),
        (5 * GIB, {"max_memory": "4GiB"}, "layerwise"),
    ],
)
def test_on_gpus_their_free_memory_counts(weights, changes, expected, resolve, monkeypatch):
    monkeypatch.setattr(memory, "uses_gpu", lambda recipe: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (8 * GIB, 80 * GIB))
    assert resolve(weights, **changes) == expected


def test_converting_weights_needs_both(tiny_directory):
    checkpoint = find_model(str(tiny_directory))
    stored = (tiny_directory / "model.safetensors").stat().st_size

    def needed(dtype):
        return memory._weight_bytes(checkpoint, load_config(checkpoint), dtype)

    assert needed("auto") == needed("float32") == stored
    assert needed("bfloat16") == stored + stored // 2


def test_sizes_are_read_and_shown_large_enough():
    texts = {"8GiB": 8 << 30, "500MB": 500_000_000, "1.5 gb": 1_500_000_000, "7B": 7}
    assert {text: parse_size(text) for text in texts} == texts
    shown = [show_size(size) for size in (1, 5 << 20, GIB + 1, 3 * GIB // 2)]
    assert shown == ["1MiB", "5MiB", "1.01GiB", "1.50GiB"]
    for text in ("8", "GiB", "-1GiB", "8 elephants", "0GiB", "1e9B", "8GiB!"):
        with pytest.raises(InputError, match=r"is not an amount of memory; .* such as 8GiB") as raised:
            parse_size(text)
        assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match="max_memory"):
        load_recipe(None, {"max_memory": "8"})


def test_memory_that_is_held_is_resident():
    size, page = 64 << 20, 4096
    before = resident_bytes()
    # new pages: an allocator might give some that the process holds already
    with mmap.mmap(-1, size) as held:
        held[::page] = bytes(size // page)
        assert resident_bytes() - before > 0.9 * size
    assert available_bytes() > 0


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
