"""What the plugin does in vLLM's engine core: a fingerprint over all ranks, and scales in the keys of blocks.

A block of an FP8 cache holds codes: what they stand for is in the scales. Connectors hand blocks from engine
to engine, or keep them, by the tokens alone; so the fingerprint goes into what they look blocks up by.
"""

import hashlib
import logging
import os
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any
from uuid import uuid4

from calib.engines.loaded_scales import ScalesInForce, fingerprint, join_ranks
from calib.errors import InputError
from calib.files.model_directory import open_model_directory
from calib.files.skipped_layers import skipped_layers
from calib.files.text import show_layers
from calib.serving import vllm_worker
from calib.serving.engine_layers import FP8_CACHES, find_directory
from calib.serving.plugin import REQUIRE, ScalesNotUsedError, guard, is_switched_on, wrap

# what a client may ask of an engine's core, by `collective_rpc`
STATE, SET, WRITE = "fp8kv_state", "fp8kv_set_scales", "fp8kv_write_watched"

_ASLEEP = "the engine sleeps: wake it up, then ask for its scales"


@dataclass
class _Connectors:
    """The connectors of this process, whose functions get no engine to look at."""

    fingerprint: str = ""  # of the scales that the engine stores with


_connectors = _Connectors()


def identify(_: Any, value: str) -> None:
    """Let the connectors of this process, a worker's or the core's, know blocks by this fingerprint."""
    _connectors.fingerprint = value


def watch_core(module: ModuleType) -> None:
    """Compare all scales before caches are made, and after every call of all workers.

    An engine that sleeps refuses new scales.
    """
    core = module.EngineCore

    @wrap(core, "_initialize_kv_caches")
    def identify_and_make_caches(make_caches: Any, self: Any, vllm_config: Any) -> Any:
        guard("vllm", lambda: refresh(self))
        result = make_caches(self, vllm_config)
        if directory := os.environ.get("FP8KV_WATCH"):  # after the warm-up, which is not traffic
            import_module("calib.watching.harvest").watch_engine(self, directory)
        return result

    @wrap(core, "collective_rpc")
    def call_and_refresh(call: Any, self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method == WRITE:
            files = getattr(self, "fp8kv_watch", None)
            return [files and files.write()]
        if method == SET and _is_asleep(self):
            raise InputError(_ASLEEP)
        if method != STATE:
            result = call(self, vllm_worker.set_scales if method == SET else method, *args, **kwargs)
            guard("vllm", lambda: refresh(self))
        return [whole_model(self).to_json()] if method in (STATE, SET) else result

    @wrap(core, "wake_up")
    def wake_and_refresh(wake: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = wake(self, *args, **kwargs)
        guard("vllm", lambda: refresh(self))
        return result


def refresh(core: Any) -> ScalesInForce | None:
    """Ask all workers what they compute with; return what has changed since the last time.

    Where every scale must be used and is not, the next step ends the engine by a ScalesNotUsedError, if no
    call mends it before. A new fingerprint also keeps blocks of before from being found in this engine's own
    prefix cache.
    """
    executor = core.model_executor
    try:
        report = whole_model(core)
    except InputError:
        return None
    first = vars(core).setdefault("fp8kv_first", report.fingerprint)
    core.fp8kv_names_blocks = bool(
        core.vllm_config.kv_transfer_config
        or report.fingerprint != first
        or getattr(core, "fp8kv_names_blocks", False)
    )
    if core.fp8kv_names_blocks and report.fingerprint != _connectors.fingerprint:
        executor.collective_rpc(identify, args=(report.fingerprint,))
        identify(core, report.fingerprint)
    vars(executor).pop("execute_model", None)
    if report.problems and is_switched_on(REQUIRE):

        def refuse(*_: Any, **__: Any) -> None:
            raise ScalesNotUsedError(str(report))

        executor.execute_model = refuse
    elif str(report) == vars(core).get("fp8kv"):
        return None
    core.fp8kv = str(report)
    return report


def whole_model(core: Any) -> ScalesInForce:
    """Ask all workers what they compute with; an InputError where they cannot tell now."""
    if _is_asleep(core):
        raise InputError(_ASLEEP)
    states: list[vllm_worker.WorkerState] = core.model_executor.collective_rpc(vllm_worker.state)
    whole, config = ScalesInForce(), core.vllm_config
    for rank, state in enumerate(states):
        if state.unreadable:
            raise InputError(f"scales cannot be compared now: {state.unreadable}")
        whole.used += state.report.used
        whole.total += state.report.total
        whole.problems += [f"rank {rank}: {problem}" for problem in state.report.problems]
        whole.notes += [f"rank {rank}: {note}" for note in state.report.notes]
        whole.awaits_scales |= state.report.awaits_scales
    ranks, heads = config.parallel_config.tensor_parallel_size, config.model_config.get_total_num_kv_heads()
    stored = join_ranks([state.stored for state in states], ranks, heads)
    whole.fingerprint, whole.fnuz = fingerprint(stored), states[0].fnuz
    whole.server = vars(core).setdefault("fp8kv_server", uuid4().hex)
    whole.stored = [(index, *scales) for index, scales in stored.items() if index < vllm_worker.DRAFT]
    # the only worker logged this when it loaded the model
    if [str(state.report) for state in states] == [states[0].logged]:
        vars(core).setdefault("fp8kv", str(whole))
    return whole


def _is_asleep(core: Any) -> bool:
    return "weights" in (getattr(core.model_executor, "sleeping_tags", None) or ())


def watch_arguments(module: ModuleType) -> None:
    """Leave in 16 bits the layers that the checkpoint's config names, where the user names none."""

    @wrap(module.EngineArgs, "create_engine_config")
    def create_and_skip(create: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        guard("vllm", lambda: skip_layers(config), "leave layers in 16 bits as the checkpoint's config says")
        return config


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

    @wrap(module.Worker, "reload_weights")
    def reload_and_note(reload: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = reload(self, *args, **kwargs)
        weights = args[0] if args else kwargs.get("weights_iterator")
        vllm_worker.note_source(self.model_runner, from_memory=weights is not None)
        return result


def watch_block_hashes(module: ModuleType) -> None:
    """Name the scales in block hashes, by which Mooncake's store, offloading and others find blocks."""

    @wrap(module, "generate_block_hash_extra_keys")
    def add_scales(extra_keys: Any, request: Any, start_token_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, place = extra_keys(request, start_token_idx, *args, **kwargs)
        if _connectors.fingerprint and start_token_idx == 0:  # a block's hash is part of the next one's
            keys = (*(keys or ()), ("fp8kv", _connectors.fingerprint))
        return keys, place


def watch_example_connector(module: ModuleType) -> None:
    """Name the scales in the folders of vLLM's example connector, which are of tokens and pictures."""

    @wrap(module.ExampleConnector, "_generate_foldername_debug")
    def add_scales(
        folder_name: Any, self: Any, token_ids: Any, mm_hashes: list[str], *args: Any, **kwargs: Any
    ) -> Any:
        known_by = [*mm_hashes, *filter(None, [_connectors.fingerprint])]
        return folder_name(self, token_ids, known_by, *args, **kwargs)


def watch_nixl(module: ModuleType) -> None:
    """Name the scales in NIXL's hash: engines whose hashes differ refuse each other."""

    @wrap(module, "compute_nixl_compatibility_hash")
    def add_scales(compatibility_hash: Any, *args: Any, **kwargs: Any) -> str:
        value: str = compatibility_hash(*args, **kwargs)
        if not _connectors.fingerprint:
            return value
        return hashlib.sha256(f"{value} {_connectors.fingerprint}".encode()).hexdigest()


def watch_lmcache(module: ModuleType) -> None:
    """Name the scales in LMCache's name of the model, which is in all of its keys; `@` takes them apart."""

    def add_scales(start: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature(start).bind(*args, **kwargs)
        if _connectors.fingerprint:
            bound.arguments["model_name"] += f"-fp8kv-{_connectors.fingerprint}"
        start(*bound.args, **bound.kwargs)

    for name in ("LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter", "LMCacheMetadata"):
        if hasattr(module, name):
            wrap(getattr(module, name), "__init__")(add_scales)
