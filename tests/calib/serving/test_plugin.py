"""The plugin finds layers of engines, and names those that compute with another scale than the files'."""

import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from itertools import zip_longest
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from calib.engines import loaded_scales
from calib.engines.loaded_scales import EngineLayer, ScalesInForce, layers_of_files
from calib.engines.outcome import Place
from calib.files.fingerprint import weights_digest
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.stored_scales import StoredLayer, StoredScales
from calib.serving import plugin, vllm_worker
from calib.serving.engine_layers import fill_scales, read_files, vllm_layers
from calib.serving.sglang_worker import sglang_attention, sglang_layers

RUNNER = "vllm.v1.worker.gpu_model_runner"
ONE = Place()
K, V = [(0.5,), (0.375,), (0.125,)], [(0.0625,), (0.09375,), (0.75,)]
AT_1 = [(1.0,)] * 3


def files(k=K, v=V, q=()):
    layers = [StoredLayer(i, *scales) for i, scales in enumerate(zip_longest(k, v, q))]
    return StoredScales(ModelDirectory(Path(), {}, {}), layers)


def compare(layers, found, *args, **kwargs):
    return loaded_scales.compare(layers, layers_of_files(found), *args, **kwargs)


@pytest.fixture(autouse=True)
def nothing_is_demanded(monkeypatch):
    monkeypatch.delenv("FP8KV_REQUIRE_SCALES", raising=False)
    monkeypatch.setattr(plugin, "_ERRORS", set())


@pytest.fixture
def runner(monkeypatch):
    """A module of vLLM's with a runner; what it loads is collected."""

    def load_model(self, *, load_dummy_weights=False):
        return load_dummy_weights

    module, checked = ModuleType(RUNNER), []
    module.GPUModelRunner = type("GPUModelRunner", (), {"load_model": load_model})
    monkeypatch.setitem(sys.modules, RUNNER, module)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(vllm_worker, "check_loaded", checked.append)
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
    assert sum(isinstance(finder, plugin._Finder) for finder in sys.meta_path) == 1


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


def test_registering_imports_the_standard_library_alone_and_the_entry_points_lead_to_it():
    code = (
        "import sys; before = set(sys.modules)\n"
        "from calib.serving.plugin import register_vllm; register_vllm()\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "import json; print(json.dumps(sorted(new - set(sys.stdlib_module_names))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["calib"]
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
    found = list(vllm_layers(nn.ModuleList([*layers, nn.Linear(2, 2)])))
    assert [(layer.layer, layer.is_fp8) for layer in found] == [(0, True), (1, False), (2, True)]
    assert found[0].k == {"_k_scale": (0.5,), "_k_scale_float": (0.5,), "_k_scale_cpu": (0.5,)}
    assert found[0].v == {"_v_scale": (0.25, 0.75), "_v_scale_float": (0.75,), "_v_scale_cpu": (0.75,)}
    assert found[0].q == {"_q_scale": (1.0,), "_q_scale_float": (1.0,)}
    assert [*found[2].k] == ["_k_scale", "_k_scale_float"]


@pytest.mark.parametrize(("heads", "fnuz"), [(1, True), (2, False)], ids=["per layer, fnuz", "per head"])
def test_every_copy_of_a_scale_is_compared_and_named(fnuz, heads):
    # query heads have the largest of those that share a KV head
    held = {"k": [0.375, 0.3125], "v": [0.25, 0.75], "q": [0.125, 0.375]}
    stored = [tuple(held[x][:heads]) for x in "kv"]
    found = files(*([each] * 3 for each in (*stored, (0.125, 0.125, 0.25, 0.375) if heads > 1 else (0.125,))))
    held = {x: [(2 if fnuz else 1) * y for y in values[:heads]] for x, values in held.items()}
    copies = [f"_{x}_scale{kind}" for x in "kvq" for kind in ("", "_float", "_cpu")][:-1]
    for copy in (None, *copies):
        model = nn.ModuleList([Attention(f"model.layers.{i}.self_attn.attn", **held) for i in range(3)])
        problems = []
        if copy:
            value = getattr(model[1], copy)
            setattr(model[1], copy, torch.ones_like(value) if isinstance(value, torch.Tensor) else 1.0)
            problem = "is at 1.0: the engine dropped the file's scale in layer 1"
            problems = [f"{copy[1].upper()}'s copy {copy} {problem}"]
        assert compare([*vllm_layers(model)], found, Place(fnuz=fnuz)).problems == problems


def test_a_backend_is_named_with_the_copies_that_it_reads():
    layer, other = (Attention(f"model.layers.{i}.self_attn.attn", k=(0.375,), v=(0.25,)) for i in range(2))
    for module in (layer, other):
        module.attn_backend = SimpleNamespace(get_name=lambda: "FLASHINFER")
    layer._k_scale_float, other._v_scale_cpu = 1.0, torch.tensor(0.75)
    report = compare([*vllm_layers(nn.ModuleList([layer, other]))], files([(0.375,)] * 2, [(0.25,)] * 2), ONE)
    at_1 = "is at 1.0: the engine dropped the file's scale in layer 0"
    assert report.problems == [
        f"K's copy _k_scale_float, which FLASHINFER reads, {at_1}",
        "V's copy _v_scale_cpu, which FLASHINFER does not read, is not the file's in layer 1",
    ]
    assert (report.used, report.total) == (3, 4)  # a copy that nothing reads is in nobody's way


@pytest.mark.parametrize("cache", ["fp8", "auto", "nvfp4", "int8_per_token_head"])
def test_a_cache_that_the_backend_has_no_kernels_for_is_a_problem(cache):
    layers = [Attention(f"model.layers.{i}.self_attn.attn", cache) for i in range(2)]
    for module in layers:
        has_kernels = "nvfp4".__eq__
        module.attn_backend = SimpleNamespace(
            get_name=lambda: "CPU_ATTN", supports_kv_cache_dtype=has_kernels
        )
    report = compare([*vllm_layers(nn.ModuleList(layers))], None, ONE)
    said = "CPU_ATTN has no kernels for int8_per_token_head, so the cache holds garbage in layers 0, 1"
    assert (said in report.problems, said in str(report)) == (("int8" in cache),) * 2
    assert not any("kernels" in problem for problem in report.problems if problem != said)


@pytest.mark.parametrize(
    ("backend", "v"), [("CPU_ATTN", (0.25, 0.75)), ("CPU_ATTN", (0.75,)), ("FLASH_ATTN", (0.25, 0.75))]
)
def test_the_line_says_that_a_kernel_takes_the_largest_scale_for_all_heads(backend, v):
    layers = [Attention(f"model.layers.{i}.self_attn.attn", v=v) for i in range(2)]
    for module in layers:
        module.attn_backend = SimpleNamespace(get_name=lambda: backend)
    model, found = nn.ModuleList(layers), files([(0.5,)] * 2, [v] * 2)
    line = "fp8kv: 4 of 4 KV scales in use, FP8 cache"
    if backend == "CPU_ATTN" and len(v) > 1:  # it reads a number alone
        line += "; CPU_ATTN takes the largest of a layer's scales for all of its heads"
    report = compare([*vllm_layers(model)], found, ONE)
    assert (str(report), report.problems) == (line, [])
    for module in layers:
        module._v_scale_float = 1.0
    assert "largest" not in str(compare([*vllm_layers(model)], found, ONE))


def test_repair_sets_every_copy_of_what_the_files_have():
    heads, fnuz = Attention("model.layers.0.self_attn.attn", k=(1.0, 1.0), v=(1.0, 1.0)), Place(2, fnuz=True)
    scalar = Attention("model.layers.1.self_attn.attn", v=(1.0,))
    in_16_bits = Attention("layers.2.attn", "auto")
    model, found = nn.ModuleList([heads, scalar, in_16_bits]), files([(0.1, 0.2, 0.3, 0.4)] * 3, [(0.5,)] * 3)
    fill_scales(model, layers_of_files(found), fnuz, 1)
    assert heads._k_scale.tolist() == pytest.approx([0.6, 0.8])
    assert [heads._k_scale_float, heads._k_scale_cpu.item()] == pytest.approx([0.8, 0.8])
    assert (heads._v_scale.tolist(), heads._v_scale_float) == ([1.0, 1.0], 1.0)
    # one place for two scales: the kernels' one stays as it is, and is named
    assert (scalar._k_scale.tolist(), scalar._v_scale.tolist()) == ([0.5], [1.0])
    assert in_16_bits._k_scale.tolist() == [0.5]
    said = compare([*vllm_layers(model)], found, fnuz, 1).problems
    assert said == ["K's copy _k_scale is not the file's in layer 1"]


class RadixAttention(nn.Module):
    def __init__(self, layer_id, k, v):
        super().__init__()
        self.layer_id, self.k_scale_float, self.v_scale_float = layer_id, k, v
        self.k_scale, self.v_scale = (x and torch.tensor(x) for x in (k, v))


def of_sglang(model):
    """The one value that all copies of K and V hold, by layer."""
    return [
        (each.layer, *(value for x in (each.k, each.v) for value in {*x.values()}))
        for each in sglang_layers(model, True)
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
    assert [*sglang_attention(nn.ModuleList([beside]))] == ["0.attn.0"]
    # as `load_kv_cache_scales` leaves a layer: a number is empty
    first, second = layers = nn.ModuleList([RadixAttention(0, 0.5, 0.25), RadixAttention(1, 0.5, 0.25)])
    second.k_scale, second.k_scale_float = 0.5, None
    first.v_scale = torch.tensor(1.0)
    report = compare([*sglang_layers(layers, True)], files([(0.5,)] * 2, [(0.25,)] * 2), ONE)
    assert report.problems == [
        "V's copy v_scale is at 1.0: the engine dropped the file's scale in layer 0",
        "K's copy k_scale_float is empty, which kernels take for 1.0 in layer 1",
    ]


@pytest.mark.parametrize(
    ("check", "level", "words"),
    [
        (lambda: ScalesInForce(2, 2), "INFO", "2 of 2 KV scales in use"),
        (lambda: ScalesInForce(1, 2, problems=["bad"]), "WARNING", "1 of 2 KV scales in use, FP8 cache; bad"),
        (lambda: [][1], "WARNING", "with the files': IndexError: list index"),
        (Mock(side_effect=Exception("as vLLM's core raises")), "WARNING", "Exception: as vLLM's core"),
    ],
)
def test_what_is_found_is_logged_and_ends_the_server_only_on_demand(check, level, words, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "vllm.fp8kv"):
        plugin.guard("vllm", check)
    ((_, number, message),) = caplog.record_tuples
    assert (logging.getLevelName(number), words in message) == (level, True)
    monkeypatch.setenv("FP8KV_REQUIRE_SCALES", "1")
    ends = pytest.raises(plugin.ScalesNotUsedError, match="fp8kv: ") if level == "WARNING" else nullcontext()
    with ends:
        plugin.guard("vllm", check)


def test_switches_take_yes_and_no_and_nothing_else(monkeypatch):
    for value, is_on in {"1": True, "TRUE": True, "Yes": True, "on": True, "OFF": False, "": False}.items():
        monkeypatch.setenv("FP8KV_REQUIRE_SCALES", value)
        with pytest.raises(plugin.ScalesNotUsedError) if is_on else nullcontext():
            plugin.guard("vllm", lambda: [][1])
    for variable in ("FP8KV_REQUIRE_SCALES", "FP8KV_REPAIR_SCALES"):
        monkeypatch.setenv(variable, "enable")
        said = f"^{variable} is 'enable', which is neither on .1, true, yes, on"
        with pytest.raises(ValueError, match=said):
            plugin.register_vllm()
        monkeypatch.delenv(variable)


def test_a_directory_without_scales_and_dummy_weights(tmp_path):
    save_file({"model.layers.0.mlp.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    read = partial(read_files, str(tmp_path), None, SimpleNamespace(load_format="auto"))
    assert read() is None
    digest = weights_digest(open_model_directory(tmp_path, weights=False))
    for purpose, layers in (("fp8", []), ("int8", None)):
        baked = json.dumps({"for": purpose, "weights": digest})
        # engines fetch the second of a model on the Hub
        for name, text in (("fp8kv_bake.json", baked), ("config.json", f'{{"fp8kv_bake": {baked}}}')):
            (tmp_path / name).write_text(text)
            assert getattr(read(), "layers", None) == layers
            (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="dummies"):
        read_files(str(tmp_path), None, SimpleNamespace(load_format="dummy"))


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
    found = read_files("someone/model", None, SimpleNamespace(load_format="auto", download_dir=str(tmp_path)))
    assert [layer.k for layer in found.layers] == [(0.5,)]


def says(function, words, caplog):
    """What goes wrong is a line in the log."""
    caplog.clear()
    function()
    function()  # again: no second line
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
    # there is no vLLM here to import from
    parallel = SimpleNamespace(tensor_parallel_size=1)
    runner = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    says(lambda: plugin.guard("vllm", lambda: vllm_worker.check(runner)), "No module named", caplog)


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """A worker of vLLM's, whose checkpoint has scales for its two layers and for a draft layer after them."""
    name = "model.layers.{}.self_attn.{}_scale"
    scales = {name.format(i, x): torch.tensor([0.5]) for i in range(3) for x in "kv"}
    save_file(scales, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for module, values in {
        "vllm": {"__version__": "0.33.0"},
        "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: 0},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_fp8_fnuz=lambda: False)},
    }.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        vars(sys.modules[module]).update(values)
    layers = [Attention(f"model.layers.{i}.self_attn.attn", v=(0.5,)) for i in range(3)]
    model, draft = nn.ModuleList(layers[:2]), nn.ModuleList(layers[2:])
    model.load_weights = lambda weights: weights
    config = SimpleNamespace(model=str(tmp_path), revision=None, get_total_num_kv_heads=lambda: 2)
    runner = SimpleNamespace(
        get_model=lambda: model, model_config=config, execute_model=lambda step: step,
        drafter=SimpleNamespace(model=draft),
        vllm_config=SimpleNamespace(
            load_config=SimpleNamespace(load_format="auto"), cache_config=SimpleNamespace(cache_dtype="fp8"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
            speculative_config=SimpleNamespace(draft_model_config=config),
        ),
    )  # fmt: skip
    return SimpleNamespace(model_runner=runner), layers


def test_a_worker_compares_its_draft_too_repairs_and_takes_new_scales(worker, monkeypatch):
    worker, layers = worker
    good = vllm_worker.check_loaded(worker.model_runner)
    assert vllm_worker.state(worker).logged == str(good)
    of_draft = "draft: 2 of 2 KV scales in use"
    assert (good.problems, good.notes, good.used) == ([], [of_draft], 4)
    layers[0]._k_scale_float = layers[2]._k_scale_float = 1.0
    copy = "K's copy _k_scale_float is twice the file's in layer {}"
    spoiled = [copy.format(0), f"draft: {copy.format(2)}"]
    assert vllm_worker.state(worker).report.problems == spoiled
    monkeypatch.setenv("FP8KV_REPAIR_SCALES", "1")
    repaired = vllm_worker.state(worker).report
    assert (repaired.problems, repaired.notes) == ([], [of_draft, *(f"repaired: {x}" for x in spoiled)])
    vllm_worker.set_scales(worker, {str(i): {"k": [0.25], "v": [0.75]} for i in range(2)})
    state = vllm_worker.state(worker)
    assert (state.report.problems, state.stored[1]) == ([], ("fp8", (0.25,), (0.75,)))
    assert layers[0]._k_scale_float == 0.25


def test_weights_that_are_loaded_by_hand_are_compared_before_the_next_step(worker, caplog):
    worker, layers = worker
    vllm_worker.watch_loading(worker.model_runner)
    assert worker.model_runner.get_model().load_weights("weights") == "weights"
    layers[1]._v_scale_float, layers[0]._q_scale, layers[0]._q_scale_float = 1.0, torch.tensor(0.25), 0.25
    assert worker.model_runner.execute_model("step") == "step"
    assert caplog.messages[0].rpartition("; ")[2] == "V's copy _v_scale_float is twice the file's in layer 1"
    assert vllm_worker.state(worker).report.awaits_scales
    vllm_worker.set_scales(worker, {str(i): {"k": [0.25], "v": [0.75]} for i in range(2)})
    assert not vllm_worker.state(worker).report.awaits_scales


def held(k, v, is_fp8=True, **others):
    """Layers of an engine that holds each scale once."""
    pairs = enumerate(zip(k, v, strict=True))
    return [EngineLayer(i, is_fp8, {"k_scale": a}, {"v_scale": b}, **others) for i, (a, b) in pairs]


def problems(k, v, found, place=ONE, rank=0):
    return compare(held(k, v), found, place, rank).problems


def times(factor, scales):
    return [(factor * x[0],) for x in scales]


def test_other_scales_are_named_with_their_layers():
    for k, v, said in (
        (K, V, []),
        (times(1 + 2**-9, K), V, []),  # rounded through bfloat16
        (times(1 + 2**-6, K), V, ["K is not the file's in layers 0, 1, 2"]),
        ([K[0], (1.0,), K[2]], V, ["K is at 1.0: the engine dropped the file's scale in layer 1"]),
        (K, [V[0], V[1], (1.5,)], ["V is twice the file's in layer 2"]),
        ([K[1], K[0], K[2]], V, ["K is not the file's in layers 0, 1"]),
    ):
        report = compare(held(k, v), files(), ONE)
        assert report.problems == said
        wrong = sum(problem.count(",") + 1 for problem in said)
        assert str(report) == "; ".join([f"fp8kv: {6 - wrong} of 6 KV scales in use, FP8 cache", *said])


def test_layers_that_only_the_files_or_only_the_engine_has_are_named():
    found = files()
    said = "{} has no scale in the files and is at 1.0 in layer 3"
    assert problems([*K, (1.0,)], [*V, (1.0,)], found) == [said.format("K"), said.format("V")]
    some, missing = held(K, V)[:1], "the files have scales for layers {}, which the engine lacks"
    assert compare(some, found, ONE).problems == [missing.format("1, 2")]
    assert compare(some, found, ONE, stages=2).problems == []  # which another stage may hold
    report = compare([], found, ONE, stages=2)
    assert (str(report), report.problems) == ("fp8kv: no attention layer here", [])
    report = compare(held(K, V, is_fp8=False), None, ONE)
    assert (str(report), report.problems) == ("fp8kv: 3 layers in 16 bits", [])


def test_scales_that_nobody_can_use_or_measured_are_not_in_use():
    unusable, unmeasured = "has no usable scale in the files", "is 1.0 in the files, which nobody measured"
    for k, said in ((0.0, unusable), (float("nan"), unusable), (1.0, unmeasured)):
        assert problems([(k,)], [(0.5,)], files([(k,)], [(0.5,)])) == [f"K {said} in layer 0"]
    # V may take the scale of K alone
    said = ["V has no scale in the files and is at 1.0 in layer 0"]
    for v, expected in ((0.5, []), (1.0, said), (0.25, ["V is not the file's in layer 0"])):
        assert problems([(0.5,)], [(v,)], files([(0.5,)], [])) == expected


def test_a_model_that_was_baked_is_right_at_1_and_no_other_scale():
    found = layers_of_files(files((), ()), range(3))
    report = loaded_scales.compare(held(AT_1, [*AT_1[:2], (0.5,)]), found, Place(fnuz=True))
    said = "fp8kv: 5 of 6 KV scales in use, FP8 cache; the model is baked: 1.0 is right; V is "
    assert str(report).startswith(said)
    assert str(report).endswith(" in layer 2")


def test_layers_in_16_bits_are_counted_and_a_whole_cache_in_16_bits_is_a_problem():
    whole = held(K, V, is_fp8=False)
    report = compare([*held(K, V)[:2], whole[2]], files(), ONE)
    assert str(report) == "fp8kv: 4 of 4 KV scales in use, FP8 cache, 1 layer in 16 bits"
    problem = "the cache is not FP8, so no scale is used"
    assert compare(whole, files(), ONE).problems == [problem]
    # a stage may hold nothing but layers left in 16 bits
    assert compare(whole[:1], files(), ONE, stages=2, is_fp8=True).problems == []
    for others in ({"stages": 2}, {"is_fp8": True}):
        assert compare(whole[:1], files(), ONE, **others).problems[0] == problem
    nvfp4 = held(AT_1, AT_1, is_fp8=False, cache="nvfp4")
    assert str(compare(nvfp4, files(), ONE)) == f"fp8kv: 3 layers in nvfp4; {problem}"


def test_a_rank_holds_its_own_heads_and_fnuz_the_doubled_scale():
    fnuz, said = Place(fnuz=True), "is not doubled for an FP8 type that ends at 240 in layers 0, 1, 2"
    assert problems(times(2, K), times(2, V), files(), fnuz) == []
    assert problems(K, V, files(), fnuz) == [f"K {said}", f"V {said}"]
    # as SGLang's layers leave it that are processed again
    assert problems(times(4, K), times(2, V), files(), fnuz) == ["K is doubled twice in layers 0, 1, 2"]
    found = files([(0.5, 0.25, 0.125, 1.5)], [(0.5,) * 4])
    for ranks, rank, k in ((2, 0, (0.5, 0.25)), (2, 1, (0.125, 1.5)), (8, 5, (0.125,))):
        v, other = (0.5,) * len(k), (rank + ranks // 2) % ranks
        assert problems([k], [v], found, Place(ranks), rank) == []
        assert problems([k], [v], found, Place(ranks), other) == ["K is not the file's in layer 0"]


def test_a_query_scale_is_optional():
    for held_q, file_q, said in (
        (1.0, None, []),
        (1.0, (0.0,), []),
        (None, (0.25,), []),  # an engine without a place for it
        (0.25, (0.25,), []),
        (0.25, (0.125, 0.25), []),
        (1.0, (1.0,), []),
        (0.25, None, ["Q is not from the files in layer 0"]),
        (0.25, (0.0,), ["Q has no usable scale in the files in layer 0"]),
        (1.0, (0.25,), ["Q is at 1.0: the engine dropped the file's scale in layer 0"]),
    ):
        q = {"q_scale": (held_q,)} if held_q else {}
        report = compare(held([(0.5,)], [(0.5,)], q=q), files([(0.5,)], [(0.5,)], [file_q]), ONE)
        assert (report.problems, report.used) == (said, 2)  # of K and V


def test_copies_that_are_wrong_in_different_ways_are_told_apart():
    layers = held(K, V)
    layers[1] = EngineLayer(1, True, {"a": (1.0,), "b": (0.375,), "c": (), "d": (0.75,)}, {"v_scale": V[1]})
    report = compare(layers, files(), ONE)
    assert report.problems == [
        "K's copy a is at 1.0: the engine dropped the file's scale in layer 1",
        "K's copy c is empty, which kernels take for 1.0 in layer 1",
        "K's copy d is twice the file's in layer 1",
    ]
    assert (report.used, report.total) == (5, 6)
    nowhere = compare([EngineLayer(0, True, {"k_scale": K[0]}, {})], files(), ONE, stages=2)
    assert (nowhere.problems, nowhere.used) == (["V has no place in layer 0"], 1)
    assert compare(layers[1:2], None, ONE).problems[1] == "K's copy b is not from the files in layer 1"
