"""FP8KV_WATCH=DIR: statistics of the traffic, read out of the cache of a running vLLM, written to DIR.

A worker notes which slots its steps write, and reads them out of the cache now and then: of an FP8 cache a
random part, in a two-hundredth of the time; of a 16-bit cache all, for exact maxima. Each rank writes a file
of its own, and the first one joins them to the files that commands read. Nothing of the text is kept.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial, wraps
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from torch import Tensor

from calib.files.atomic import save_tensors
from calib.files.names import STATS_FILE, WATCH_FILE
from calib.files.strict_json import json_text
from calib.scales.cache_counts import CacheCounts, WatchedLayer, join_watched, watched_stats
from calib.scales.stats_file import save_stats
from calib.serving import vllm_worker
from calib.serving.engine_layers import FP8_CACHES, IN_16_BITS, vllm_attention
from calib.serving.scale_fingerprint import fingerprint, join_ranks, stored_scales
from calib.serving.slots import BlockMap, WrittenSlots, layer_cache

MOST_COUNTED = 512  # tokens that are read at once; of an FP8 cache, in all
MOST_WRITTEN = 2048  # tokens that wait to be read
_SHARE = 0.005  # of the time, for reading an FP8 cache, and for writing files
_SECONDS = 10.0  # between two writes
_KEY = "fp8kv_rank"  # of the metadata in a rank's file
_PARTS = ("amax", "codes", "largest", "scales")

_logger = logging.getLogger("vllm.fp8kv")


def watch_steps(runner: type[Any]) -> None:
    """Let runners of this class count what their steps store, once `watch` was called."""
    step = runner.execute_model

    @wraps(step)
    def execute_and_count(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        harvest = None if kwargs.get("dummy_run") else getattr(self, "fp8kv_harvest", None)
        if harvest:
            _try(self, lambda: harvest.before(scheduler_output))
        result = step(self, scheduler_output, *args, **kwargs)
        if harvest:
            _try(self, lambda: harvest.after(scheduler_output))
        return result

    runner.execute_model = execute_and_count


def watch_engine(core: Any, directory: str, method: str) -> None:
    """Let all workers of an engine begin to count, by their `method`, which is `watch`."""
    try:
        path, core.fp8kv_lock = prepare(Path(directory), core.vllm_config.parallel_config)
        core.model_executor.collective_rpc(method, args=(str(path), uuid4().hex))
    except Exception as error:  # noqa: BLE001  a server goes on
        _warn(error)


def watch(worker: Any, directory: str, run: str) -> None:
    """Begin to count in a worker, whose engine has made its caches and warmed up; `run` names the engine."""
    runner = worker.model_runner
    _try(runner, lambda: _watch(worker, Harvest(runner, Path(directory), run)))


def _watch(worker: Any, harvest: "Harvest") -> None:
    worker.model_runner.fp8kv_harvest = harvest
    # its cache is discarded in sleep, and gone when it ends
    for name, action in (("sleep", harvest.forget), ("shutdown", harvest.finish)):
        if method := getattr(worker, name, None):
            setattr(worker, name, _act_first(action, method))


def _act_first(action: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def act_and_call(*args: Any, **kwargs: Any) -> Any:
        action()
        return method(*args, **kwargs)

    return act_and_call


def _try(runner: Any, action: Callable[[], None]) -> None:
    """Stop counting where `action` fails: a server goes on."""
    try:
        action()
    except Exception as error:  # noqa: BLE001
        runner.fp8kv_harvest = None
        _warn(error)


def _warn(error: Exception) -> None:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    _logger.warning(f"fp8kv: the cache is not watched: {reason:.400}")


class Harvest:
    """Counts of what one worker's cache held."""

    def __init__(self, runner: Any, directory: Path, run: str) -> None:
        """Find the caches of a runner; a ValueError where they cannot be read."""
        import vllm  # type: ignore[import-not-found]
        from vllm.distributed import get_tensor_model_parallel_rank  # type: ignore[import-not-found]

        self._runner, self._directory, self._run = runner, directory, run
        parallel = runner.vllm_config.parallel_config
        for kind in ("pipeline", "decode_context", "prefill_context"):
            if getattr(parallel, f"{kind}_parallel_size", 1) > 1:
                raise ValueError(f"{kind.replace('_', ' ')} parallelism is not known here")
        self._rank, self._ranks = get_tensor_model_parallel_rank(), parallel.tensor_parallel_size
        self._engine = f"vLLM {vllm.__version__}"
        modules = {
            module.layer_name: (index, module)
            for index, module in vllm_attention(runner.get_model()).items()
            if getattr(module, "kv_sharing_target_layer_name", None) is None
            and hasattr(module, "num_kv_heads")
        }
        groups = runner.kv_cache_config.kv_cache_groups
        self._groups = [[modules[name] for name in group.layer_names if name in modules] for group in groups]
        self._modules = {index: module for group in self._groups for index, module in group}
        self._fp8_types = {index: _fp8_type(module) for index, module in self._modules.items()}
        if not self._modules:
            raise ValueError("no layer has a cache of K and V (latents are not watched)")
        self._slots = WrittenSlots([group.kv_cache_spec.block_size for group in groups])
        self._seconds = float(os.environ.get("FP8KV_WATCH_SECONDS", _SECONDS))
        self._random = torch.Generator()  # the engine draws from the usual one
        self._next_write = self._next_note = 0.0
        self._failure = ""
        self._begin()
        for index, module in self._modules.items():
            self._map(index, module)
        # a worker is a forked process as a rule, at whose end nothing of atexit's runs
        self._at_exit = Finalize(None, self.finish, exitpriority=0)

    def _begin(self) -> None:
        """Begin with the scales of now: codes stand for other values than before."""
        self._stored = stored_scales([*vllm_worker.all_layers(self._runner)])
        self._is_fp8 = any(self._fp8_types.values())
        self._since, self.tokens = _now(), 0  # that steps wrote
        self.counts: dict[int, CacheCounts] = {}
        self._maps: dict[Any, BlockMap] = {}
        self._slots.forget()

    def before(self, step: Any) -> None:
        """Read slots that the step may write again."""
        if self._slots.is_overwritten(step):
            self.read()

    def after(self, step: Any) -> None:
        """Note the slots that the step has written; read them and write the files when it is time.

        Of an FP8 cache a sample is enough: after a reading nothing is noted for 200 times as long.
        """
        self.tokens += step.total_num_scheduled_tokens
        start = time.monotonic()
        self._slots.note(step, with_slots=start >= self._next_note)
        most = MOST_COUNTED if self._is_fp8 else MOST_WRITTEN
        if self._slots.tokens >= most or start >= self._next_write:
            self.read()
        if start >= self._next_write:
            written = time.monotonic()
            self.write()
            end = time.monotonic()
            self._next_write = max(start + self._seconds, end + (end - written) / _SHARE)

    def read(self) -> None:
        """Count what the noted slots hold, of an FP8 cache a part, and forget them."""
        start, slots = time.monotonic(), self._slots.take()
        for group, of_group in zip(self._groups, slots, strict=True):
            if self._is_fp8 and len(of_group) > MOST_COUNTED:
                chosen = torch.randperm(len(of_group), generator=self._random)[:MOST_COUNTED]
                of_group = of_group[chosen]
            for part in torch.split(of_group, MOST_COUNTED):
                for index, module in group if len(part) else ():
                    counts = CacheCounts.of(self._map(index, module).read(layer_cache(module), part))
                    self.counts[index] = self.counts[index].add(counts) if index in self.counts else counts
        if self._is_fp8:
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
        """Return what K and V of a layer are stored with, [2, H]."""
        values = (torch.tensor(scale or (1.0,)) for scale in self._stored[index][1:])
        return torch.stack([scale.expand(self._modules[index].num_kv_heads) for scale in values])

    def check_scales(self) -> None:
        """Begin anew where the scales are other ones than before."""
        if stored_scales([*vllm_worker.all_layers(self._runner)]) != self._stored:
            self._begin()

    def forget(self) -> None:
        """Forget slots that were written and not read: their cache is discarded."""
        self._slots.forget()

    def finish(self) -> None:
        """Read and write what is left."""
        self._at_exit.cancel()
        try:
            self.read()
        except Exception as error:  # noqa: BLE001  the process ends, and perhaps its device has
            self._report(error)
        self.write()
        self._runner.fp8kv_harvest = None

    # ---- files ----

    def write(self) -> None:
        """Write this rank's file, and on the first rank those of all; an engine goes on where that fails."""
        try:
            self._write_rank()
            if self._rank == 0:
                self._join_ranks()
        except Exception as error:  # noqa: BLE001
            self._report(error)

    def _report(self, error: Exception) -> None:
        line = f"fp8kv: nothing is written to {self._directory}: {type(error).__name__}: {error}"
        if line != self._failure:
            _logger.warning(line)
        self._failure = line

    def _write_rank(self) -> None:
        tensors, layers = dict[str, Tensor](), {}
        for index, on_device in self.counts.items():
            module, counts, fp8 = self._modules[index], on_device.to_cpu(), self._fp8_types[index]
            name = module.layer_name.removesuffix(".attn")
            layers[name] = {"layer": index, "tokens": counts.tokens, "fp8": fp8 and str(fp8).split(".")[1]}
            layers[name]["cuts_off"] = self._map(index, module).cuts_off
            parts = {"amax": counts.amax, "codes": counts.codes, "largest": counts.largest}
            parts["scales"] = self._scales_of(index) if fp8 else None
            tensors |= {f"{name}.{part}": x for part, x in parts.items() if x is not None}
        facts = {
            "run": self._run,
            "tokens": self.tokens,
            "layers": layers,
            "stored": {str(i): scales for i, scales in self._stored.items()},
        }
        _replace(
            self._rank_file(self._rank), partial(save_tensors, tensors, metadata={_KEY: json_text(facts)})
        )

    def _rank_file(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}.safetensors"

    def _join_ranks(self) -> None:
        files = [self._rank_file(rank) for rank in range(self._ranks)]
        oldest = min(file.stat().st_mtime for file in files)
        ranks = [read_rank(file) for file in files]
        if (
            any(facts["run"] != self._run for facts, _ in ranks)
            or time.time() - oldest > 10 * self._seconds + 600
        ):
            raise ValueError("the file of another rank is old, or of another run")
        heads = self._runner.model_config.get_total_num_kv_heads()
        parts = [layers for _, layers in ranks]
        names = [name for name in parts[0] if all(name in layers for layers in parts)]
        layers = {name: join_watched([part[name] for part in parts], heads) for name in names}
        if not layers:
            return
        stored = [
            {int(i): (cache, tuple(k), tuple(v)) for i, (cache, k, v) in facts["stored"].items()}
            for facts, _ in ranks
        ]
        facts = {
            "fp8kv_watch": 1,
            "engine": self._engine,
            "model": str(self._runner.model_config.model),
            "fingerprint": fingerprint(join_ranks(stored, self._ranks, heads)),
            "since": self._since,
            "written": _now(),
            "tokens": self.tokens,
            "layers": [layer.to_json() for layer in sorted(layers.values(), key=lambda layer: layer.layer)],
        }
        _replace(self._directory / STATS_FILE, partial(save_stats, watched_stats(layers)))
        _replace(self._directory / WATCH_FILE, lambda path: path.write_text(json_text(facts) + "\n"))


def prepare(directory: Path, parallel: Any) -> tuple[Path, FileLock]:
    """Return the directory of an engine, without files of an earlier run, and the lock that keeps it.

    Engines of data parallelism have a directory each. A ValueError where another engine writes there.
    """
    if parallel.data_parallel_size > 1:
        _remove_files(directory)  # of an engine alone, which the route would show
        directory = directory / f"dp-{parallel.data_parallel_rank}"
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another engine writes to {directory}; give each a directory of its own") from None
    _remove_files(directory)
    return directory, lock


def _remove_files(directory: Path) -> None:
    for file in (directory / STATS_FILE, directory / WATCH_FILE, *directory.glob("rank-*.safetensors")):
        file.unlink(missing_ok=True)


def read_rank(path: Path) -> tuple[dict[str, Any], dict[str, WatchedLayer]]:
    """Read what a rank has written: facts, and its part of each layer by module."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()[_KEY])
        names = {*file.keys()}
        layers = {}
        for name, layer in facts["layers"].items():
            amax, codes, largest, scales = (
                file.get_tensor(f"{name}.{part}") if f"{name}.{part}" in names else None for part in _PARTS
            )
            assert amax is not None
            counts = CacheCounts(layer["tokens"], amax, codes, largest)
            dtype = layer["fp8"] and getattr(torch, layer["fp8"])
            layers[name] = WatchedLayer(layer["layer"], counts, dtype, scales, layer["cuts_off"])
    return facts, layers


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside `path`, then give it that name."""
    scratch = path.with_name(f".{path.name}.partial")
    try:
        write(scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _fp8_type(module: Any) -> torch.dtype | None:
    """Return the type of a layer's codes, None for 16 bits; a ValueError for another cache."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    cache: torch.dtype = current_platform.fp8_dtype()
    if module.kv_cache_dtype in FP8_CACHES:
        return torch.float8_e5m2 if module.kv_cache_dtype == "fp8_e5m2" else cache
    if module.kv_cache_dtype in IN_16_BITS:
        return None
    raise ValueError(f"a cache of {module.kv_cache_dtype} makes its own scales")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
