"""What the plugin does in vLLM's engine core: a fingerprint over all ranks, and scales in the keys of blocks.

A block of an FP8 cache holds codes: what they stand for is in the scales. Connectors hand blocks from engine
to engine, or keep them, by the tokens alone; so the fingerprint goes into what they look blocks up by.
"""

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from functools import wraps
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

from calib.errors import InputError
from calib.files.model_directory import open_model_directory
from calib.files.skipped_layers import skipped_layers
from calib.files.text import show_layers
from calib.serving import vllm_worker
from calib.serving.engine_layers import FP8_CACHES, find_directory
from calib.serving.loaded_scales import ScalesInForce
from calib.serving.plugin import ScalesNotUsedError, guard, is_required
from calib.serving.scale_fingerprint import fingerprint, join_ranks

# methods that workers get
_STATE, _SET, _IDENTIFY, _WATCH = "fp8kv_state", "fp8kv_set_scales", "fp8kv_identify", "fp8kv_watch"

_identity = ""  # of the scales that this process's engine stores with


def identify(value: str) -> None:
    """Let this process's connectors know blocks by scales of this fingerprint."""
    global _identity
    _identity = value


def watch_workers(module: ModuleType) -> None:
    """Give workers the methods that the engine's core calls, and that `calib.push_scales` calls."""
    worker = module.WorkerBase
    setattr(worker, _STATE, vllm_worker.state)
    setattr(worker, _SET, vllm_worker.set_scales)
    setattr(worker, _IDENTIFY, lambda _, value: identify(value))
    setattr(worker, _WATCH, lambda self, *args: import_module("calib.serving.harvest").watch(self, *args))


def watch_core(module: ModuleType) -> None:
    """Compare all scales before caches are made, and after every call of all workers."""
    core = module.EngineCore
    make_caches, call, wake = core._initialize_kv_caches, core.collective_rpc, core.wake_up

    @wraps(make_caches)
    def identify_and_make_caches(self: Any, config: Any) -> Any:
        guard("vllm", lambda: refresh(self))
        result = make_caches(self, config)
        if directory := os.environ.get("FP8KV_WATCH"):  # after the warm-up, which is not traffic
            import_module("calib.serving.harvest").watch_engine(self, directory, _WATCH)
        return result

    @wraps(call)
    def call_and_refresh(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method in (_STATE, _SET) and _is_asleep(self):
            raise InputError("the engine sleeps: wake it up, then ask for its scales")
        result = call(self, method, *args, **kwargs)
        if method not in (_STATE, _IDENTIFY, _WATCH):
            guard("vllm", lambda: refresh(self))
        return result

    @wraps(wake)
    def wake_and_refresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = wake(self, *args, **kwargs)
        guard("vllm", lambda: refresh(self))
        return result

    core._initialize_kv_caches, core.collective_rpc, core.wake_up = (
        identify_and_make_caches, call_and_refresh, wake_and_refresh,
    )  # fmt: skip


def refresh(core: Any) -> ScalesInForce | None:
    """Ask all workers what they compute with; return what has changed since the last time.

    Where every scale must be used and is not, the next step ends the engine, if no call mends it before.
    A new fingerprint also keeps blocks of before from being found in this engine's own prefix cache.
    """
    executor = core.model_executor
    states = [] if _is_asleep(core) else executor.collective_rpc(_STATE)
    if not states or any("unreadable" in state for state in states):
        return None
    report = whole_model(states)
    first = vars(core).setdefault("fp8kv_first", report.fingerprint)
    core.fp8kv_names_blocks = bool(
        core.vllm_config.kv_transfer_config
        or report.fingerprint != first
        or getattr(core, "fp8kv_names_blocks", False)
    )
    if core.fp8kv_names_blocks and report.fingerprint != _identity:
        executor.collective_rpc(_IDENTIFY, args=(report.fingerprint,))
        identify(report.fingerprint)
    vars(executor).pop("execute_model", None)
    if report.problems and is_required():

        def refuse(*_: Any, **__: Any) -> None:
            raise ScalesNotUsedError(str(report))

        executor.execute_model = refuse
    elif str(report) == vars(core).get("fp8kv"):
        return None
    core.fp8kv = str(report)
    return report


def whole_model(states: Sequence[Mapping[str, Any]]) -> ScalesInForce:
    """Join what `vllm_worker.state` returns of each rank; an InputError where one could not tell."""
    for state in states:
        if "unreadable" in state:
            raise InputError(f"scales cannot be compared now: {state['unreadable']}")
    stored = [{int(i): (c, tuple(k), tuple(v)) for i, (c, k, v) in s["stored"].items()} for s in states]
    return ScalesInForce(
        used=sum(state["used"] for state in states),
        total=sum(state["total"] for state in states),
        problems=[f"rank {rank}: {x}" for rank, state in enumerate(states) for x in state["problems"]],
        notes=[f"rank {rank}: {x}" for rank, state in enumerate(states) for x in state["notes"]],
        fingerprint=fingerprint(join_ranks(stored, states[0]["ranks"], states[0]["kv_heads"])),
    )


def _is_asleep(core: Any) -> bool:
    return "weights" in (getattr(core.model_executor, "sleeping_tags", None) or ())


def watch_arguments(module: ModuleType) -> None:
    """Leave in 16 bits the layers that the checkpoint's config names, where the user names none."""
    create = module.EngineArgs.create_engine_config

    @wraps(create)
    def create_and_skip(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        task = "leave layers in 16 bits as the checkpoint's config says"
        guard("vllm", lambda: skip_layers(config), task)
        return config

    module.EngineArgs.create_engine_config = create_and_skip


def skip_layers(config: Any) -> None:
    """Take the layers that stay in 16 bits from the files into vLLM's `config`."""
    cache, model = config.cache_config, config.model_config
    # with `auto` the attention layers turn FP8 on later, if the checkpoint announces its scales
    if cache.cache_dtype not in (*FP8_CACHES, "auto") or config.load_config.load_format == "dummy":
        return
    directory = find_directory(model.model, model.revision, config.load_config)
    skipped = skipped_layers(open_model_directory(directory, weights=False))
    if not skipped:
        return
    own = cache.kv_cache_dtype_skip_layers
    if not own:
        cache.kv_cache_dtype_skip_layers = [*map(str, skipped)]
    choice = f"the command line leaves {' '.join(own)} instead" if own else "so are they here"
    line = f"fp8kv: the checkpoint's config leaves {show_layers(skipped)} in 16 bits; {choice}"
    logging.getLogger("vllm.fp8kv").info(line)


def watch_reload(module: ModuleType) -> None:
    """Note whether a worker's new weights are from files, whose scales then count, or from memory."""
    reload = module.Worker.reload_weights

    @wraps(reload)
    def reload_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = reload(self, *args, **kwargs)
        weights = args[0] if args else kwargs.get("weights_iterator")
        vllm_worker.note_source(self.model_runner, from_memory=weights is not None)
        return result

    module.Worker.reload_weights = reload_and_note


# ---- connectors ----


def watch_block_hashes(module: ModuleType) -> None:
    """Block hashes: Mooncake's store, offloading, and every other connector that looks blocks up by them."""
    extra_keys = module.generate_block_hash_extra_keys

    @wraps(extra_keys)
    def add_scales(request: Any, start: int, *args: Any, **kwargs: Any) -> Any:
        keys, place = extra_keys(request, start, *args, **kwargs)
        if _identity and start == 0:  # the hash of a block is part of the next one's
            keys = (*(keys or ()), ("fp8kv", _identity))
        return keys, place

    module.generate_block_hash_extra_keys = add_scales  # type: ignore[attr-defined]


def watch_example_connector(module: ModuleType) -> None:
    """vLLM's example of a connector, which knows blocks by tokens and pictures."""
    folder_name = module.ExampleConnector._generate_foldername_debug

    @wraps(folder_name)
    def add_scales(self: Any, token_ids: Any, mm_hashes: list[str], *args: Any, **kwargs: Any) -> Any:
        return folder_name(self, token_ids, [*mm_hashes, *filter(None, [_identity])], *args, **kwargs)

    module.ExampleConnector._generate_foldername_debug = add_scales


def watch_nixl(module: ModuleType) -> None:
    """NIXL: engines whose hashes differ refuse each other."""
    compatibility_hash = module.compute_nixl_compatibility_hash

    @wraps(compatibility_hash)
    def add_scales(*args: Any, **kwargs: Any) -> str:
        value: str = compatibility_hash(*args, **kwargs)
        return hashlib.sha256(f"{value} {_identity}".encode()).hexdigest() if _identity else value

    module.compute_nixl_compatibility_hash = add_scales  # type: ignore[attr-defined]


def watch_lmcache(module: ModuleType) -> None:
    """LMCache: the name of the model is in all of its keys."""
    for name in ("LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter"):
        adapter = getattr(module, name)
        start = adapter.__init__

        @wraps(start)
        def add_scales(self: Any, *args: Any, _start: Any = start, **kwargs: Any) -> None:
            bound = signature(_start).bind(self, *args, **kwargs)
            bound.arguments["model_name"] += f"@{_identity}" if _identity else ""
            _start(*bound.args, **bound.kwargs)

        adapter.__init__ = add_scales
