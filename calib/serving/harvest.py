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

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from torch import Tensor

from calib.files.atomic import save_tensors
from calib.files.names import STATS_FILE, WATCH_FILE
from calib.files.strict_json import json_text
from calib.scales.cache_counts import CacheCounts, WatchedLayer, join_watched, watched_stats
from calib.scales.stats_file import save_stats
from calib.serving.engine_layers import FP8_CACHES, vllm_attention, vllm_layers
from calib.serving.scale_fingerprint import fingerprint, stored_scales
from calib.serving.slots import BlockMap, WrittenSlots, layer_cache

MOST_COUNTED = 512  # tokens that are read at once; of an FP8 cache, in all
MOST_WRITTEN = 2048  # tokens that wait to be read
_SHARE = 0.005  # of the time, for reading an FP8 cache
_SECONDS = 10.0  # between two writes
_KEY = "fp8kv_rank"  # of the metadata in a rank's file
_PARTS = ("amax", "codes", "largest", "scales")

_logger = logging.getLogger("vllm.fp8kv")


def watch_steps(runner: type[Any], directory: str) -> None:
    """Let runners of this class write what their steps store to `directory`."""
    step = runner.execute_model

    @wraps(step)
    def execute_and_watch(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        harvest = None
        if not kwargs.get("dummy_run") and scheduler_output.total_num_scheduled_tokens:
            _try(self, partial(_start, self, directory))
            harvest = self.fp8kv_harvest
        if harvest:
            _try(self, partial(harvest.before, scheduler_output))
        result = step(self, scheduler_output, *args, **kwargs)
        if harvest:
            _try(self, partial(harvest.after, scheduler_output))
        return result

    runner.execute_model = execute_and_watch


def _start(runner: Any, directory: str) -> None:
    if not hasattr(runner, "fp8kv_harvest"):
        runner.fp8kv_harvest = None  # where what follows fails
        runner.fp8kv_harvest = Harvest(runner, Path(directory))


def _try(runner: Any, action: Callable[[], None]) -> None:
    """Stop watching where `action` fails: a server goes on."""
    try:
        action()
    except Exception as error:  # noqa: BLE001
        runner.fp8kv_harvest = None
        _logger.warning(
            f"fp8kv: the cache is not watched: {type(error).__name__}: {' '.join(str(error).split())}"
        )


class Harvest:
    """Counts of what one worker's cache held."""

    def __init__(self, runner: Any, directory: Path) -> None:
        """Find the caches of a runner; a ValueError where they cannot be read."""
        import vllm  # type: ignore[import-not-found]
        from vllm.distributed import get_tensor_model_parallel_rank  # type: ignore[import-not-found]

        self._runner, self._directory = runner, directory
        self._rank, parallel = get_tensor_model_parallel_rank(), runner.vllm_config.parallel_config
        self._ranks = parallel.tensor_parallel_size
        if parallel.pipeline_parallel_size > 1:
            raise ValueError("pipeline stages are not joined")
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(directory / f".rank-{self._rank}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"another engine writes to {directory}; give each a directory of its own"
            ) from None
        modules = vllm_attention(runner.get_model())
        by_name = {module.layer_name: (index, module) for index, module in modules.items()}
        groups = runner.kv_cache_config.kv_cache_groups
        self._groups = [
            [by_name[name] for name in group.layer_names if name in by_name and _has_cache(by_name[name][1])]
            for group in groups
        ]
        if not any(self._groups):
            raise ValueError("no layer has a cache of K and V (latents are not watched)")
        self._fp8_types = {index: _fp8_type(module) for group in self._groups for index, module in group}
        self._engine = f"vLLM {vllm.__version__}"
        self._slots = WrittenSlots([group.kv_cache_spec.block_size for group in groups])
        self._seconds = float(os.environ.get("FP8KV_WATCH_SECONDS", _SECONDS))
        self._next_read = self._next_write = 0.0
        self._failure = ""
        self._begin()
        # a worker is a forked process as a rule, at whose end nothing of atexit's runs
        self._at_exit = Finalize(None, self.finish, exitpriority=0)

    def _begin(self) -> None:
        """Begin with the scales of now: codes stand for other values than before."""
        version = self._engine.split()[-1]
        self._scales = stored_scales([*vllm_layers(self._runner.get_model(), version)])
        self.fingerprint = fingerprint(self._scales)
        self._since, self.tokens = _now(), 0  # that steps wrote
        self.counts: dict[int, CacheCounts] = {}
        self._maps: dict[Any, BlockMap] = {}

    def before(self, step: Any) -> None:
        """Read slots that the step may write again."""
        if self._slots.is_overwritten(step):
            self.read()

    def after(self, step: Any) -> None:
        """Note the slots that the step has written; read them and write the files when it is time."""
        self._slots.note(step)
        now = time.monotonic()
        if self._slots.tokens >= MOST_WRITTEN or now >= self._next_write:
            self.read()
        if now >= self._next_write:
            self._next_write = now + self._seconds
            self.write()

    def read(self) -> None:
        """Count what the noted slots hold, of an FP8 cache a part or nothing, and forget them."""
        start, is_fp8 = time.monotonic(), bool(self.fingerprint)
        self.tokens += self._slots.tokens
        slots = self._slots.take()
        if is_fp8 and start < self._next_read:
            return
        for group, of_group in zip(self._groups, slots, strict=True):
            if is_fp8 and len(of_group) > MOST_COUNTED:
                of_group = of_group[torch.randperm(len(of_group))[:MOST_COUNTED]]
            for part in torch.split(of_group, MOST_COUNTED):
                for index, module in group if len(part) else ():
                    self._count(index, module, part)
        self._next_read = time.monotonic() + (time.monotonic() - start) / _SHARE

    def _count(self, index: int, module: Any, slots: Tensor) -> None:
        cache = layer_cache(module)
        kind = module.impl.__class__, cache.dtype, cache.shape, cache.stride(), module.num_kv_heads
        if kind not in self._maps:
            dtype, scales = self._runner.model_config.dtype, self._scales_of(index, module)
            self._maps[kind] = BlockMap(module, dtype, self._fp8_types[index], scales)
        counts = CacheCounts.of(self._maps[kind].read(cache, slots))
        self.counts[index] = self.counts[index].add(counts) if index in self.counts else counts

    def _scales_of(self, index: int, module: Any) -> Tensor:
        """Return what K and V of a layer are stored with, [2, H]."""
        values = (torch.tensor(scale or (1.0,)) for scale in self._scales[index][1:])
        return torch.stack([scale.expand(module.num_kv_heads) for scale in values])

    def use_scales(self, of_now: str) -> None:
        """Begin anew where the fingerprint of the scales is another one `of_now`."""
        if of_now != self.fingerprint:
            self._slots.take()
            self._begin()

    def finish(self) -> None:
        """Read and write what is left."""
        self._at_exit.cancel()
        try:
            self.read()
        except Exception as error:  # noqa: BLE001  the process ends, and perhaps its device has
            self._report(error)
        self.write()

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
        line = f"fp8kv: cannot write to {self._directory}: {type(error).__name__}: {error}"
        if line != self._failure:
            _logger.warning(line)
        self._failure = line

    def _write_rank(self) -> None:
        tensors, layers = dict[str, Tensor](), {}
        modules = {index: module for group in self._groups for index, module in group}
        for index, counts in self.counts.items():
            module, counts = modules[index], counts.to_cpu()
            name, fp8 = module.layer_name.removesuffix(".attn"), self._fp8_types[index]
            layers[name] = {
                "layer": index,
                "tokens": counts.tokens,
                "fp8": fp8 and str(fp8).removeprefix("torch."),
            }
            parts = {"amax": counts.amax, "codes": counts.codes, "largest": counts.largest}
            parts["scales"] = self._scales_of(index, module) if fp8 else None
            tensors |= {f"{name}.{part}": x for part, x in parts.items() if x is not None}
        facts = {
            "fingerprint": self.fingerprint,
            "ranks": self._ranks,
            "tokens": self.tokens,
            "layers": layers,
        }
        facts["kv_heads"] = self._runner.model_config.get_total_num_kv_heads()
        path = self._directory / f"rank-{self._rank}.safetensors"
        _replace(path, partial(save_tensors, tensors, metadata={_KEY: json_text(facts)}))

    def _join_ranks(self) -> None:
        ranks = [read_rank(self._directory / f"rank-{rank}.safetensors") for rank in range(self._ranks)]
        if len({facts["ranks"] for facts, _ in ranks} | {self._ranks}) > 1:
            raise ValueError("files of other ranks are of another run")
        heads = ranks[0][0]["kv_heads"]
        layers = {
            name: join_watched([layers[name] for _, layers in ranks], heads)
            for name in ranks[0][1]
            if all(name in layers for _, layers in ranks)
        }
        if not layers:
            return
        facts = {
            "fp8kv_watch": 1,
            "engine": self._engine,
            "model": self._runner.model_config.model,
            "fingerprint": self.fingerprint,
            "since": self._since,
            "written": _now(),
            "tokens": self.tokens,
            "layers": [layer.to_json() for layer in sorted(layers.values(), key=lambda x: x.layer)],
        }
        _replace(self._directory / STATS_FILE, partial(save_stats, watched_stats(layers)))
        _replace(self._directory / WATCH_FILE, lambda path: path.write_text(json_text(facts) + "\n"))


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
            layers[name] = WatchedLayer(layer["layer"], counts, dtype, scales)
    return facts, layers


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside `path`, then give it that name."""
    scratch = path.with_name(f".{path.name}.partial")
    try:
        write(scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _has_cache(module: Any) -> bool:
    """Return whether a module has a cache of K and V of its own."""
    is_shared = getattr(module, "kv_sharing_target_layer_name", None) is not None
    return not is_shared and hasattr(module, "num_kv_heads")


def _fp8_type(module: Any) -> torch.dtype | None:
    """Return the type of a layer's codes; None for a cache in 16 bits."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if module.kv_cache_dtype not in FP8_CACHES:
        return None
    return torch.float8_e5m2 if module.kv_cache_dtype == "fp8_e5m2" else current_platform.fp8_dtype()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
