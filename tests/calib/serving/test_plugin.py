"""The plugin registers without a sound, finds the layers, and ends the server only when asked."""

import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from calib.engines.outcome import Place
from calib.files.model_directory import ModelDirectory
from calib.files.stored_scales import StoredLayer, StoredScales
from calib.serving import plugin
from calib.serving.loaded_scales import ScalesInForce, compare

RUNNER = "vllm.v1.worker.gpu_model_runner"


@pytest.fixture(autouse=True)
def nothing_is_demanded(monkeypatch):
    monkeypatch.delenv("FP8KV_REQUIRE_SCALES", raising=False)


@pytest.fixture
def runner(monkeypatch):
    """A module of vLLM's with a runner; what it loads is collected."""

    def load_model(self, *, load_dummy_weights=False):
        return load_dummy_weights

    module, checked = ModuleType(RUNNER), []
    module.GPUModelRunner = type("GPUModelRunner", (), {"load_model": load_model})
    monkeypatch.setitem(sys.modules, RUNNER, module)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(plugin, "_check_vllm", checked.append)
    return module.GPUModelRunner, checked


def test_a_runner_that_is_imported_already_is_watched_once(runner):
    watched, checked = runner
    plugin.register_vllm()
    plugin.register_vllm()
    one = watched()
    assert one.load_model() is False
    assert checked == [one]
    assert one.load_model(load_dummy_weights=True) is True  # the real ones come later
    assert checked == [one]
    assert sum(isinstance(finder, plugin._RunnerFinder) for finder in sys.meta_path) == 1


def test_a_runner_is_watched_as_it_is_imported(tmp_path, monkeypatch, runner):
    package = tmp_path.joinpath("vllm", "v1", "worker")
    package.mkdir(parents=True)
    source = "class GPUModelRunner:\n    def load_model(self):\n        return 7\n"
    (package / "gpu_model_runner.py").write_text(source)
    monkeypatch.delitem(sys.modules, RUNNER)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin.register_vllm()
    assert import_module(RUNNER).GPUModelRunner().load_model() == 7
    assert len(runner[1]) == 1
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


def test_registering_imports_the_standard_library_alone():
    code = (
        "import sys; before = set(sys.modules)\n"
        "from calib.serving.plugin import register_vllm; register_vllm()\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "import json; print(json.dumps(sorted(new - set(sys.stdlib_module_names))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["calib"]


def test_the_entry_points_lead_to_functions():
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        (point,) = [p for p in entry_points(group=group) if p.name == "fp8kv"]
        assert callable(point.load())


class Attention(nn.Module):
    """A layer of vLLM's, which holds a number on the host beside each scale."""

    def __init__(self, name, dtype="fp8", kind="decoder", k=(0.5,), v=(0.25, 0.75), q=(1.0,)):
        super().__init__()
        self.layer_name, self.kv_cache_dtype, self.attn_type = name, dtype, kind
        for x, values in (("k", k), ("v", v), ("q", q)):
            self.register_buffer(f"_{x}_scale", torch.tensor(values))
            setattr(self, f"_{x}_scale_float", max(values))
        self._k_scale_cpu, self._v_scale_cpu = torch.tensor(max(k)), torch.tensor(max(v))


def test_layers_of_vllm():
    names = ("visual.blocks.0.attn", *(f"model.layers.{i}.self_attn.attn" for i in range(3)))
    kinds = (("fp8", "encoder_only"), ("fp8",), ("auto",), ("fp8",))
    layers = [Attention(name, *kind) for name, kind in zip(names, kinds, strict=True)]
    del layers[3]._k_scale_cpu  # vLLM 0.23 has none
    found = list(plugin.vllm_layers(nn.ModuleList([*layers, nn.Linear(2, 2)])))
    assert [(layer.layer, layer.is_fp8) for layer in found] == [(0, True), (1, False), (2, True)]
    assert found[0].k == {"_k_scale": (0.5,), "_k_scale_float": (0.5,), "_k_scale_cpu": (0.5,)}
    assert found[0].v == {"_v_scale": (0.25, 0.75), "_v_scale_float": (0.75,), "_v_scale_cpu": (0.75,)}
    assert found[0].q == {"_q_scale": (1.0,), "_q_scale_float": (1.0,)}
    assert [*found[2].k] == ["_k_scale", "_k_scale_float"]


def problems_of(layers, k, v, q=None, *, fnuz=False):
    """What the plugin says of layers whose files hold these scales in each."""
    directory = ModelDirectory(Path(), {}, {})
    stored = StoredScales(directory, [StoredLayer(layer.layer, k, v, q) for layer in layers])
    report = compare(layers, stored, Place(fnuz=fnuz))
    assert report.used == report.total - sum(x[0] in "KV" for x in report.problems)
    return report.problems


# vLLM's query heads have the largest of those that share a KV head
HELD = {"k": [0.375, 0.3125], "v": [0.25, 0.75], "q": [0.125, 0.375]}
COPIES = [f"_{x}_scale{kind}" for x in "kvq" for kind in ("", "_float", "_cpu")][:-1]


@pytest.mark.parametrize(("heads", "fnuz"), [(1, True), (2, False)], ids=["per layer, fnuz", "per head"])
def test_every_copy_of_a_scale_is_compared_and_named(fnuz, heads):
    held = {x: [(2 if fnuz else 1) * y for y in values[:heads]] for x, values in HELD.items()}
    k, v, q = (
        *(tuple(HELD[x][:heads]) for x in "kv"),
        (0.125, 0.125, 0.25, 0.375) if heads > 1 else (0.125,),
    )
    for copy in (None, *COPIES):
        model = nn.ModuleList([Attention(f"model.layers.{i}.self_attn.attn", **held) for i in range(3)])
        problems = []
        if copy:
            value = getattr(model[1], copy)
            setattr(model[1], copy, torch.ones_like(value) if isinstance(value, torch.Tensor) else 1.0)
            problem = "is at 1.0: the engine dropped the file's scale in layer 1"
            problems = [f"{copy[1].upper()}'s copy {copy} {problem}"]
        layers = [*plugin.vllm_layers(model)]
        assert problems_of(layers, k, v, q, fnuz=fnuz) == problems


class RadixAttention(nn.Module):
    def __init__(self, layer_id, k, v):
        super().__init__()
        self.layer_id, self.k_scale_float, self.v_scale_float = layer_id, k, v
        self.k_scale, self.v_scale = (x and torch.tensor(x) for x in (k, v))


def of_sglang(model):
    """The one value that all copies of K and V hold, by layer."""
    return [
        (each.layer, *(value for x in (each.k, each.v) for value in {*x.values()}))
        for each in plugin.sglang_layers(model, True)
    ]


def test_layers_of_sglang():
    placeless = nn.ModuleList([RadixAttention(0, 0.5, 0.25), RadixAttention(1, None, None)])
    assert of_sglang(placeless) == [(0, (0.5,), (0.25,)), (1, (1.0,), (1.0,))]
    mla = nn.Module()  # of whose two layers one counts
    mla.attn_mqa, mla.attn_mha = RadixAttention(0, 0.5, 0.25), RadixAttention(0, None, None)
    beside = nn.Module()  # a model of transformers
    beside.attention_instances = {0: RadixAttention(0, 0.5, 0.25)}
    for module in (nn.ModuleList([mla]), beside):
        assert of_sglang(module) == [(0, (0.5,), (0.25,))]
    assert [*plugin.sglang_attention(nn.ModuleList([beside]))] == ["0.attn.0"]


def test_the_number_that_sglang_leaves_empty_is_named():
    model = nn.ModuleList([RadixAttention(0, 0.5, 0.25), RadixAttention(1, 0.5, 0.25)])
    # as `load_kv_cache_scales` leaves it
    model[1].k_scale, model[1].k_scale_float = 0.5, None
    model[0].v_scale = torch.tensor(1.0)
    assert problems_of([*plugin.sglang_layers(model, True)], (0.5,), (0.25,)) == [
        "V's copy v_scale is at 1.0: the engine dropped the file's scale in layer 0",
        "K's copy k_scale_float is empty, which kernels take for 1.0 in layer 1",
    ]


@pytest.mark.parametrize(
    ("check", "level", "words"),
    [
        (lambda: ScalesInForce(2, 2), "INFO", "2 of 2 KV scales in use"),
        (
            lambda: ScalesInForce(1, 2, problems=["K is bad"]),
            "WARNING",
            "1 of 2 KV scales in use, FP8 cache; K is",
        ),
        (lambda: [][1], "WARNING", "with the files': IndexError: list index"),
    ],
)
def test_what_is_found_is_logged_and_ends_the_server_only_on_demand(check, level, words, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "vllm.fp8kv"):
        plugin._guard("vllm", check)
    ((_, number, message),) = caplog.record_tuples
    assert (logging.getLevelName(number), words in message) == (level, True)
    monkeypatch.setenv("FP8KV_REQUIRE_SCALES", "1")
    ends = pytest.raises(plugin.ScalesNotUsedError, match="fp8kv: ") if level == "WARNING" else nullcontext()
    with ends:
        plugin._guard("vllm", check)


class Loading(SimpleNamespace):
    load_format, download_dir = "auto", None


def test_a_directory_without_scales_and_dummy_weights(tmp_path):
    save_file({"model.layers.0.mlp.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert plugin._read(str(tmp_path), None, Loading()) is None
    with pytest.raises(ValueError, match="dummies"):
        plugin._read(str(tmp_path), None, Loading(load_format="dummy"))


def test_a_model_of_the_hub_is_read_where_the_engine_has_put_it(tmp_path):
    commit, repository = "0" * 40, tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "refs", repository / "trees"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    # a file that no engine fetches
    listing = {"format_version": 1, "files": {"README.md": {"size": 1, "blob_id": commit}}}
    (repository / "trees" / f"{commit}.json").write_text(json.dumps(listing))
    scales = {f"model.layers.0.self_attn.{x}_scale": torch.tensor([0.5]) for x in "kv"}
    save_file(scales, snapshot / "model.safetensors")
    found = plugin._read("someone/model", None, Loading(download_dir=str(tmp_path)))
    assert [layer.k for layer in found.layers] == [(0.5,)]


def says(function, words, caplog):
    """What goes wrong is a line in the log."""
    caplog.clear()
    function()
    (record,) = caplog.records
    said = record.getMessage()
    assert (record.levelname, words in said, "\n" in said) == ("WARNING", True, False)
    assert said.startswith("fp8kv: cannot compare")


def test_a_runner_that_has_no_method_is_left_alone(monkeypatch, runner, caplog):
    monkeypatch.setattr(sys.modules[RUNNER], "GPUModelRunner", type("GPUModelRunner", (), {}))
    says(plugin.register_vllm, "no attribute 'load_model'", caplog)
    caplog.clear()
    monkeypatch.setitem(sys.modules, RUNNER, None)  # which nobody may import
    plugin.register_vllm()
    assert not caplog.records


def test_an_engine_that_is_not_there_or_has_moved_its_parts_goes_on(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang", None)
    says(plugin.register_sglang, "ModuleNotFoundError", caplog)
    hooks = {}
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].HookRegistry = SimpleNamespace(register=hooks.__setitem__)
    plugin.register_sglang()
    (hook,) = hooks.values()
    says(lambda: hook(None, SimpleNamespace()), "No module named", caplog)
    hook(None, SimpleNamespace(is_draft_worker=True))
    # there is no vLLM here to import from
    says(lambda: plugin._guard("vllm", lambda: plugin._check_vllm(None)), "No module named", caplog)
