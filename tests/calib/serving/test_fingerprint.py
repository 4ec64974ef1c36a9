"""Engines have one fingerprint if a block of one means the same in the other; blocks are known by it."""

import asyncio
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from calib import push_scales
from calib.engines.loaded_scales import (
    EngineLayer,
    ScalesInForce,
    compare_stored,
    fingerprint,
    join_ranks,
    stored_scales,
)
from calib.engines.outcome import Place
from calib.errors import InputError
from calib.evaluate.served.client import ServedScales
from calib.files.stored_scales import StoredLayer
from calib.serving import vllm_engine, vllm_worker
from calib.serving.endpoint import ScalesEndpoint
from calib.serving.plugin import ScalesNotUsedError
from calib.serving.push import ScalesNotDeliveredError
from calib.serving.vllm_worker import WorkerState

K, V = (0.5, 0.25, 0.125, 0.75), (0.375,) * 4


def engine(k=K, v=V, cache="fp8", count=2):
    """What layers of an engine store with."""
    one = EngineLayer(0, cache != "16 bits", {"k_scale": k}, {"v_scale": v}, cache=cache)
    return stored_scales([replace(one, layer=i) for i in range(count)])


def test_a_fingerprint_is_of_what_k_and_v_are_stored_with():
    whole = fingerprint(engine())
    same = engine(v=(0.375,), cache="fp8_e4m3")  # one value for all heads, and another name of the cache
    assert (len(whole), whole) == (32, fingerprint(same))
    others = [
        engine(k=(*K[:3], 0.75000006)), engine(k=K[::-1]), engine(K, (0.5,)), engine(count=1),
        engine(cache="fp8_e5m2"), {**engine(), 1: engine(cache="16 bits")[1]},
        {i + 1: scales for i, scales in engine().items()},
    ]  # fmt: skip
    assert len({whole, *map(fingerprint, others)}) == 8
    assert fingerprint(engine(cache="16 bits")) == ""
    # of the copies, the one that the backend stores with
    layer = EngineLayer(0, True, {"_k_scale": K, "_k_scale_float": (1.0,)}, {"_v_scale": V})
    assert stored_scales([layer])[0][1] == K
    assert stored_scales([EngineLayer(**vars(layer) | {"written": ("_k_scale_float",)})])[0][1] == (1.0,)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_fingerprint_does_not_depend_on_how_many_gpus_a_model_is_split_over(ranks):
    # with more ranks than heads, some hold the same one; V has one scale
    heads = [tuple(K[rank * 4 // ranks : rank * 4 // ranks + max(1, 4 // ranks)]) for rank in range(ranks)]
    parts = [{stage: engine(k, (0.375,))[stage]} for stage in range(2) for k in heads]
    assert fingerprint(join_ranks(parts, ranks, 4)) == fingerprint(engine())


def test_what_a_whole_model_stores_with_is_compared_with_the_files():
    files = {i: StoredLayer(i, K, V) for i in range(2)}
    doubled = engine(tuple(2 * x for x in K), tuple(2 * x for x in V))
    for stored, fnuz, layers in (
        (engine(), False, []),
        (engine((0.75,), V[:1]), False, []),  # the largest, where a backend has one number
        (engine((0.5, 0.75)), False, []),  # and of two ranks
        (engine(K[::-1]), False, [0, 1]),
        (engine((0.5,)), False, [0, 1]),
        (engine((0.75, 0.5)), False, [0, 1]),
        (engine(v=(float("nan"),)), False, [0, 1]),
        (doubled, True, []),
        (doubled, False, [0, 1]),
        (engine(count=1), False, [1]),
        (engine(count=3), False, [2]),
        (engine(cache="16 bits"), False, [0, 1]),
        ({**engine(), 1: ("16 bits", (), ())}, False, []),  # a layer that was left out
        ({**engine(), 1: ("fp8", (0.5,), V)}, False, [1]),
    ):
        assert compare_stored(stored, files, Place(fnuz=fnuz)) == layers


def state(k=(0.5,), problems=(), **facts):
    """What a worker says, as the engine's core gets it."""
    return WorkerState(ScalesInForce(4 - len(problems), 4, problems=[*problems], **facts), engine(k, (0.25,)))


class Core:
    """vLLM's engine core, with workers that say `states`."""

    def __init__(self, *states, connector=True):
        self.vllm_config = SimpleNamespace(
            kv_transfer_config="a connector" if connector else None,
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 4),
        )
        self.model_executor = SimpleNamespace(collective_rpc=self._answer)
        self.states, self.calls = list(states), []

    def _answer(self, method, args=()):
        self.calls.append((method.__name__, *args))
        return [self.states.pop(0)] if method is vllm_worker.state else None

    def _initialize_kv_caches(self, config):
        return "caches"

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return method if isinstance(method, str) else self._answer(method, args)

    def wake_up(self):
        return True


@pytest.fixture
def core(monkeypatch):
    """Makes such a core, watched by the plugin."""
    monkeypatch.setattr(vllm_engine._connectors, "fingerprint", "")
    module = ModuleType("vllm.v1.engine.core")
    module.EngineCore = type("EngineCore", (Core,), dict(vars(Core)))
    vllm_engine.watch_core(module)
    return module.EngineCore


def test_scales_are_compared_before_caches_are_made_and_after_every_call(core, caplog):
    caplog.set_level("INFO", "vllm.fp8kv")
    first, second = (fingerprint(engine(k, (0.25,))) for k in ((0.5,), (0.75,)))
    one = core(state(), state(), state((0.75,)), state((0.75,), ["K is bad"]))
    assert one._initialize_kv_caches(None) == "caches"
    assert one.calls == [("state",), ("identify", first)]
    assert one.collective_rpc("reload_weights") == "reload_weights"  # nothing has changed
    assert one.wake_up() is True
    assert one.calls[-1] == ("identify", second)
    one.collective_rpc("add_lora")
    good = "fp8kv: 4 of 4 KV scales in use, FP8 cache, fingerprint {}"
    bad = f"fp8kv: 3 of 4 KV scales in use, FP8 cache, fingerprint {second}; rank 0: K is bad"
    assert caplog.messages == [good.format(first), good.format(second), bad]
    # a client asks the core, which logs nothing then
    one.states = [state((0.75,))]
    (answer,) = one.collective_rpc("fp8kv_state")
    assert (answer["used"], answer["fingerprint"], len(caplog.messages)) == (4, second, 3)
    one.states = [replace(worker := state(), stored=worker.stored | {10**6: worker.stored[0]}, fnuz=True)]
    (answer,) = one.collective_rpc("fp8kv_state")  # of a draft nothing
    assert (answer["stored"], answer["fnuz"]) == ([(i, "fp8", (0.5,), (0.25,)) for i in range(2)], True)
    two = core(state(), state())  # of several API processes, each says its core's number
    numbers = [each.collective_rpc("fp8kv_state")[0]["server"] for each in (two, two, core(state()))]
    assert (numbers[0] == numbers[1], len({*numbers})) == (True, 2)
    one.states = [WorkerState(unreadable="weights are being updated")]
    with pytest.raises(InputError, match="cannot be compared now: weights are being updated"):
        one.collective_rpc("fp8kv_state")
    one.model_executor.sleeping_tags = {"weights"}
    for method in ("fp8kv_state", "fp8kv_set_scales"):
        with pytest.raises(InputError, match="the engine sleeps: wake it up"):
            one.collective_rpc(method)
    vllm_engine.identify(None, "")
    loaded = state(notes=["draft: 2 of 2 KV scales in use"])
    core(replace(loaded, logged=str(loaded.report)))._initialize_kv_caches(None)
    assert len(caplog.messages) == 3
    without = core(state(), state((0.75,)), connector=False)
    without.wake_up()
    assert without.calls == [("state",)]
    without.wake_up()  # its own prefix cache has blocks of before
    assert without.calls[-1] == ("identify", second)


def test_the_route_says_what_is_stored_and_a_client_reads_it(monkeypatch, tmp_path):
    stored = [(0, "fp8", (0.5, float("nan")), (0.25,)), (1, "16 bits", (), ())]
    report = ScalesInForce(3, 4, stored=stored, server="7")
    endpoint, routes = ScalesEndpoint(), {}

    async def ask():
        return report

    monkeypatch.setattr(endpoint, "_ask", ask)
    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(HTTPException=KeyError))
    app = SimpleNamespace(add_api_route=lambda path, call, methods: routes.update({path: call}))
    endpoint.attach_router(app)
    said = json.dumps(asyncio.run(routes["/v1/fp8kv/scales"]()), allow_nan=False)
    scales = ServedScales.model_validate_json(said)
    assert scales.server == "7"
    layers = [(x.layer, x.cache, x.k, x.v) for x in scales.layers]
    assert layers == [(0, "fp8", [0.5, None], [0.25]), (1, "16 bits", [], [])]
    for directory, status in ("", 404), (str(tmp_path), 425):  # not watched; nothing was read yet
        monkeypatch.setenv("FP8KV_WATCH", directory)
        with pytest.raises(KeyError, match=f"{status}"):
            asyncio.run(routes["/v1/fp8kv/watch"]())


def test_where_all_scales_are_required_nothing_is_computed_until_they_are_right(core, monkeypatch):
    monkeypatch.setenv("FP8KV_REQUIRE_SCALES", "1")
    one, ends = core(), partial(pytest.raises, ScalesNotUsedError, match="K is bad")
    # from memory weights come without scales, which may follow
    for from_memory, says in ((False, ends), (True, nullcontext)):
        one.states = [state(problems=["K is bad"], awaits_scales=from_memory), state()]
        with says():
            one.collective_rpc("update_weights")
        with ends():
            one.model_executor.execute_model("step")
        one.collective_rpc("update_weights")
        assert not hasattr(one.model_executor, "execute_model")


def test_connectors_know_blocks_by_the_scales(monkeypatch):
    hashes = ModuleType("kv_cache_utils")
    hashes.generate_block_hash_extra_keys = lambda request, start, end, place: (None, place)
    example, nixl = ModuleType("example_connector"), ModuleType("metadata")
    name = {"_generate_foldername_debug": lambda _, token_ids, mm_hashes, make=False: (token_ids, mm_hashes)}
    example.ExampleConnector = type("ExampleConnector", (), name)
    nixl.compute_nixl_compatibility_hash = lambda config: "abc"
    lmcache = ModuleType("multi_process_adapter")

    def start(self, url, context, model_name):
        self.model_name = model_name

    for name in ("LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter", "LMCacheMetadata"):
        setattr(lmcache, name, type(name, (), {"__init__": start}))
    vllm_engine.watch_block_hashes(hashes)
    vllm_engine.watch_example_connector(example)
    vllm_engine.watch_nixl(nixl)
    vllm_engine.watch_lmcache(lmcache)

    def keys():
        return (
            hashes.generate_block_hash_extra_keys("request", 0, 16, 0),
            example.ExampleConnector()._generate_foldername_debug(token_ids=[1], mm_hashes=["picture"]),
            nixl.compute_nixl_compatibility_hash("config"),
            lmcache.LMCacheMPWorkerAdapter("url", "context", model_name="llama").model_name,
            lmcache.LMCacheMPSchedulerAdapter("url", "context", "llama").model_name,
            lmcache.LMCacheMetadata("url", "context", "llama").model_name,
        )

    vllm_engine.identify(None, "")
    assert keys() == ((None, 0), ([1], ["picture"]), "abc", "llama", "llama", "llama")
    vllm_engine.identify(None, "cafe")
    block, folder, nixl_hash, *names = keys()
    assert block == ((("fp8kv", "cafe"),), 0)
    assert (folder, names) == (([1], ["picture", "cafe"]), ["llama-fp8kv-cafe"] * 3)
    assert len(nixl_hash) == 64
    assert hashes.generate_block_hash_extra_keys("request", 16, 32, 0) == (None, 0)
    vllm_engine.identify(None, "beef")
    assert keys()[2] != nixl_hash
    vllm_engine.identify(None, "")


def test_pushed_scales_reach_every_layer_or_are_named(core):
    one = core(state(), state())
    scales = {f"model.layers.0.self_attn.{x}_scale": torch.tensor([0.5]).view(-1, 1, 1) for x in "kv"}
    assert push_scales(one, scales) == fingerprint(engine((0.5,), (0.25,)))
    assert one.calls[0] == ("set_scales", {"0": {"k": [0.5], "v": [0.5]}})
    with pytest.raises(ScalesNotDeliveredError, match="rank 0: K's copy _k_scale_float is at 1.0 in layer 3"):
        push_scales(core(*[state(problems=["K's copy _k_scale_float is at 1.0 in layer 3"])] * 2), scales)
    for name, bad in (("mlp.weight", torch.ones(1)), ("self_attn.k_scale", torch.zeros(1))):
        with pytest.raises(InputError, match="is not a KV-cache scale"):
            push_scales(core(), {f"model.layers.0.{name}": bad})
    with pytest.raises(InputError, match="fp8kv installed where it runs"):
        push_scales(SimpleNamespace(), scales)

    async def call_all(name, *call):
        return [getattr(one, name)(*call) for one in cores]

    # of data parallelism
    cores = core(state(), state()), core(*[state(problems=["K is bad"])] * 2)
    engines = SimpleNamespace(engine_core=SimpleNamespace(call_utility_all_async=call_all))
    with pytest.raises(ScalesNotDeliveredError, match="engine 1: .*rank 0: K is bad"):
        asyncio.run(push_scales(engines, scales))
