"""FP8KV_WATCH=DIR: statistics of the traffic, read out of the cache of a running vLLM, written to DIR.

A worker notes which slots its steps write, and reads them out of the cache now and then: of an FP8 cache a
random part, in a four-hundredth of the time; of a 16-bit cache all, for exact maxima. The engine's core asks
all workers for their counts and writes the files that commands read. Nothing of the text is kept.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from calib.engines.loaded_scales import Stored, fingerprint, join_ranks, stored_scales
from calib.files.names import STATS_FILE, WATCH_FILE
from calib.files.strict_json import json_text
from calib.scales.cache_counts import CacheCounts, WatchedLayer, join_watched, watched_stats
from calib.scales.stats_file import save_stats
from calib.serving import vllm_worker
from calib.serving.engine_layers import FP8_CACHES, IN_16_BITS, vllm_attention
from calib.serving.plugin import errors_to, wrap
from calib.watching.slots import BlockMap, WrittenSlots, layer_cache

MOST_COUNTED = 512  # tokens that are read at once; of an FP8 cache, in all
MOST_WRITTEN = 2048  # tokens that wait to be read
_SHARE, _WRITING_SHARE = 0.0025, 0.001  # of the time, for reading an FP8 cache, and for writing files
_SECONDS = 10.0  # between two writes of an engine that is busy
_PATIENCE = 4.0  # seconds, for the answers of workers at the end; vLLM kills them after 5

_logger = logging.getLogger("vllm.fp8kv")


@dataclass(frozen=True)
class WorkerCounts:
    """Counts of the tokens that the steps of one worker wrote."""

    since: str
    tokens: int
    layers: dict[str, WatchedLayer]  # by module
    stored: Stored


def watch_steps(runner: type[Any]) -> None:
    """Let runners of this class count what their steps store, once `watch` was called."""

    @wrap(runner, "execute_model")
    def execute_and_count(execute: Any, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        harvest = None if kwargs.get("dummy_run") else getattr(self, "fp8kv_harvest", None)
        if harvest:
            _try(self, lambda: harvest.before(scheduler_output))
        result = execute(self, scheduler_output, *args, **kwargs)
        if harvest:
            _try(self, lambda: harvest.after(scheduler_output))
        return result


def watch(worker: Any) -> bool | None:
    """Begin to count in a worker, whose engine has made its caches and warmed up.

    Return whether it counts a sample, as of an FP8 cache; None: it cannot count.
    """

    def begin() -> bool:
        harvest = worker.model_runner.fp8kv_harvest = Harvest(worker.model_runner)

        def forget_and_discard(discard: Any, *args: Any, **kwargs: Any) -> Any:
            harvest.slots.forget()
            return discard(*args, **kwargs)

        for name in ("sleep", "discard"):  # their cache
            if hasattr(worker, name):
                wrap(worker, name)(forget_and_discard)
        return harvest.is_fp8

    return _try(worker.model_runner, begin)  # type: ignore[no-any-return]


def count(worker: Any) -> WorkerCounts | None:
    """Return what a worker has counted so far; None where it does not count."""
    harvest = getattr(worker.model_runner, "fp8kv_harvest", None)
    return harvest and _try(worker.model_runner, harvest.count)


def _try(runner: Any, action: Callable[[], Any]) -> Any:
    """Stop counting where `action` fails: a server goes on."""

    def stop(error: Exception) -> None:
        runner.fp8kv_harvest = None
        _warn("the cache is not watched", error)

    with errors_to(stop):
        return action()


def _warn(problem: str, error: Exception) -> None:
    name = "" if type(error) is ValueError else f"{type(error).__name__}: "  # ours are whole sentences
    reason = name + " ".join(str(error).split())
    _logger.warning(f"fp8kv: {problem}: {reason:.400}")


class Harvest:
    """Counts of what one worker's cache held."""

    def __init__(self, runner: Any) -> None:
        """Find the caches of a runner; a ValueError where they cannot be read."""
        self._runner = runner
        parallel = runner.vllm_config.parallel_config
        for kind in ("pipeline", "decode_context", "prefill_context"):
            if getattr(parallel, f"{kind}_parallel_size", 1) > 1:
                raise ValueError(f"{kind.replace('_', ' ')} parallelism is not known here")
        modules = {
            module.layer_name: (index, module)
            for index, module in vllm_attention(runner.get_model()).items()
            if getattr(module, "kv_sharing_target_layer_name", None) is None
            and not hasattr(module, "kv_lora_rank")  # whose latent counts as one KV head
        }
        groups = runner.kv_cache_config.kv_cache_groups
        self._groups = [[modules[name] for name in group.layer_names if name in modules] for group in groups]
        self._modules = {index: module for group in self._groups for index, module in group}
        self._fp8_types = {index: _fp8_type(module) for index, module in self._modules.items()}
        if not self._modules:
            raise ValueError("no layer has a cache of K and V (latents are not watched)")
        self.slots = WrittenSlots([group.kv_cache_spec.block_size for group in groups])
        self._random = torch.Generator()  # the engine draws from the usual one
        self._next_note = 0.0
        self._begin()
        for index, module in self._modules.items():
            self._map(index, module)

    def _begin(self) -> None:
        """Begin with the scales of now: codes stand for other values than before."""
        self._stored = stored_scales([*vllm_worker.all_layers(self._runner)])
        self.is_fp8 = any(self._fp8_types.values())
        self._since, self.tokens = _now(), 0  # that steps wrote
        self.counts: dict[int, CacheCounts] = {}
        self._maps: dict[Any, BlockMap] = {}
        self.slots.forget()

    def before(self, step: Any) -> None:
        """Read slots that the step may write again."""
        if self.slots.is_overwritten(step):
            self.read()

    def after(self, step: Any) -> None:
        """Note the slots that the step has written, and read them when they are many.

        Of an FP8 cache a sample is enough: after a reading nothing is noted for 400 times as long.
        """
        self.tokens += step.total_num_scheduled_tokens
        self.slots.note(step, with_slots=time.monotonic() >= self._next_note)
        if self.slots.tokens >= (MOST_COUNTED if self.is_fp8 else MOST_WRITTEN):
            self.read()

    def read(self) -> None:
        """Count what the noted slots hold, of an FP8 cache a part, and forget them."""
        start, slots = time.monotonic(), self.slots.take()
        for group, of_group in zip(self._groups, slots, strict=True):
            if self.is_fp8 and len(of_group) > MOST_COUNTED:
                of_group = of_group[torch.randperm(len(of_group), generator=self._random)[:MOST_COUNTED]]
            for part in torch.split(of_group, MOST_COUNTED):
                for index, module in group if len(part) else ():
                    counts = CacheCounts.of(self._map(index, module).read(layer_cache(module), part))
                    self.counts[index] = self.counts[index].add(counts) if index in self.counts else counts
        if self.is_fp8:
            self._next_note = time.monotonic() + (time.monotonic() - start) / _SHARE

    def _map(self, index: int, module: Any) -> BlockMap:
        """Return where the layer keeps what in a block; layers of one kind share it."""
        cache = layer_cache(module)
        kind = type(module.impl), cache.dtype, cache.shape, cache.stride(), module.num_kv_heads
        if kind not in self._maps:
            dtype, scales = self._runner.model_config.dtype, self._scales_of(index)
            self._maps[kind] = BlockMap(module, dtype, self._fp8_types[index], scales)
        return self._maps[kind]

    def _scales_of(self, index: int) -> Tensor:
        """Return what K and V of a layer are stored with, [2, K] float32."""
        values = (torch.tensor(scale or (1.0,)) for scale in self._stored[index][1:])
        return torch.stack([scale.expand(self._modules[index].num_kv_heads) for scale in values])

    def check_scales(self) -> None:
        """Begin anew where the scales are other ones than before."""
        if stored_scales([*vllm_worker.all_layers(self._runner)]) != self._stored:
            self._begin()

    def count(self) -> WorkerCounts:
        """Read what is left, and return all counts."""
        self.read()
        layers = {}
        for index, counts in self.counts.items():
            module, fp8 = self._modules[index], self._fp8_types[index]
            scales, cuts_off = self._scales_of(index) if fp8 else None, self._map(index, module).cuts_off
            name = module.layer_name.removesuffix(".attn")
            layers[name] = WatchedLayer(index, counts.to_cpu(), fp8, scales, cuts_off)
        return WorkerCounts(self._since, self.tokens, layers, self._stored)


def _fp8_type(module: Any) -> torch.dtype | None:
    """Return the type of a layer's codes, None for 16 bits; a ValueError for another cache."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    cache: torch.dtype = current_platform.fp8_dtype()
    if module.kv_cache_dtype in FP8_CACHES:
        return torch.float8_e5m2 if module.kv_cache_dtype == "fp8_e5m2" else cache
    if module.kv_cache_dtype in IN_16_BITS:
        return None
    raise ValueError(f"a cache of {module.kv_cache_dtype} makes its own scales")


def watch_engine(core: Any, directory: str) -> None:
    """Let all workers of an engine count, and its core write what they have counted."""
    with errors_to(partial(_warn, f"the cache is not watched (FP8KV_WATCH={directory})")):
        files = core.fp8kv_watch = WatchFiles(core, Path(directory))
        answers = core.model_executor.collective_rpc(watch)
        if None not in answers:
            part = f"a sample, in {_SHARE:.2%} of the time" if any(answers) else "every token"
            _logger.info(f"fp8kv: the cache is watched ({part}); statistics go to {files.directory}")

        @wrap(core, "post_step")
        def write_after(after: Any, *args: Any, **kwargs: Any) -> Any:
            files.after_step()
            return after(*args, **kwargs)

        @wrap(core, "shutdown")
        def write_and_shut_down(shutdown: Any, *args: Any, **kwargs: Any) -> Any:
            if sys.exc_info()[0] in (None, SystemExit):  # after a failure workers may not answer
                files.write(_PATIENCE)
            return shutdown(*args, **kwargs)


class WatchFiles:
    """The files of one engine, replaced whole again and again.

    Engines of data parallelism have a directory each.
    """

    def __init__(self, core: Any, directory: Path) -> None:
        """Take the directory, without files of an earlier run; a ValueError where another engine has it."""
        self._seconds = _seconds_between_writes()
        parallel = core.vllm_config.parallel_config
        # vLLM gives engines of a dense model a size of 1, the first an index of 0, and leaves them this
        most = max(parallel.data_parallel_size, getattr(parallel, "elastic_ep_max_dp_size", None) or 1)
        if most > 1 or parallel.data_parallel_index:
            _remove_files(directory)  # of an engine alone, which the route would show
            directory = directory / f"dp-{parallel.data_parallel_index}"
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(directory / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            advice = "give each a directory of its own"
            raise ValueError(f"another engine writes to {directory}; {advice}") from None
        _remove_files(directory)
        self._core, self.directory, self._failure = core, directory, ""
        self._last, self._earliest = -self._seconds, 0.0

    def after_step(self) -> None:
        """Write when it is time: every few seconds, and when the last request is over."""
        is_idle, start = not self._core.scheduler.has_unfinished_requests(), time.monotonic()
        if start < self._earliest or not (is_idle or start >= self._last + self._seconds):
            return
        self.write()
        end = time.monotonic()
        self._last, self._earliest = start, end + (end - start) / _WRITING_SHARE

    def write(self, timeout: float | None = None) -> None:
        """Write what all workers have counted; an engine goes on where that fails.

        A `timeout` is for the end alone: vLLM takes a late answer for that of the next call.
        """
        with errors_to(self._warn_once):
            ranks = self._core.model_executor.collective_rpc(count, timeout=timeout)
            if not all(ranks):
                _remove_files(self.directory)  # which would tell of an hour that is over
                raise ValueError("a worker does not count, and says why")
            self._write(ranks)

    def _warn_once(self, error: Exception) -> None:
        if (failure := str(error)) != self._failure:
            _warn(f"nothing is written to {self.directory}", error)
        self._failure = failure

    def _write(self, ranks: list[WorkerCounts]) -> None:
        import vllm  # type: ignore[import-not-found]

        config = self._core.vllm_config
        model = str(config.model_config.model)
        heads = config.model_config.get_total_num_kv_heads()
        names = [name for name in ranks[0].layers if all(name in rank.layers for rank in ranks)]
        layers = {name: join_watched([rank.layers[name] for rank in ranks], heads) for name in names}
        if not layers:
            return
        stored = join_ranks([rank.stored for rank in ranks], len(ranks), heads)
        facts = {
            "fp8kv_watch": 1,
            "engine": f"vLLM {vllm.__version__}",
            "model": os.path.abspath(model) if os.path.isdir(model) else model,
            "fingerprint": fingerprint(stored),
            "since": ranks[0].since,
            "written": _now(),
            "tokens": ranks[0].tokens,
            "layers": [layer.to_json() for layer in sorted(layers.values(), key=lambda layer: layer.layer)],
        }
        _replace(self.directory / STATS_FILE, partial(save_stats, watched_stats(layers)))
        _replace(self.directory / WATCH_FILE, lambda path: path.write_text(json_text(facts) + "\n"))


def _seconds_between_writes() -> float:
    text = os.environ.get("FP8KV_WATCH_SECONDS", str(_SECONDS))
    with suppress(ValueError):
        if 0 <= float(text) < inf:
            return float(text)
    raise ValueError(f"FP8KV_WATCH_SECONDS is '{text}'; give the seconds between two writes, such as 10")


def _remove_files(directory: Path) -> None:
    for name in (STATS_FILE, WATCH_FILE):
        (directory / name).unlink(missing_ok=True)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside `path`, then give it that name."""
    scratch = path.with_name(f".{path.name}.partial")
    try:
        write(scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
