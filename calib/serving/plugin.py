"""Plugin of vLLM and SGLang: workers say whether they use the files' scales, when loaded and when updated.

Entry points `vllm.general_plugins` and `sglang.srt.plugins`. Registering imports the standard library
alone. Everything runs inside `guard`: an error becomes one line in the log, and the server goes on.
FP8KV_REQUIRE_SCALES=1: a server ends with that line unless it uses every scale of its checkpoint.
FP8KV_REPAIR_SCALES=1: vLLM's workers set every copy of a scale to the file's first.
FP8KV_WATCH=DIR: vLLM's workers write statistics of what their caches hold.
A server ends where one of the first two says neither yes nor no.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calib.engines.loaded_scales import ScalesInForce

# vLLM's runners, which hold a worker's model
_RUNNERS = {
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner",
    "vllm.v1.worker.gpu.model_runner": "GPUModelRunner",
    "vllm.v1.worker.cpu_model_runner": "CPUModelRunner",
}
_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1."
# other parts of vLLM, and the function of `vllm_engine` that changes each
_PARTS = {
    "vllm.engine.arg_utils": "watch_arguments",
    "vllm.v1.worker.gpu_worker": "watch_reload",
    "vllm.v1.engine.core": "watch_core",
    "vllm.v1.core.kv_cache_utils": "watch_block_hashes",
    f"{_CONNECTORS}example_connector": "watch_example_connector",
    f"{_CONNECTORS}nixl.metadata": "watch_nixl",
    f"{_CONNECTORS}lmcache_integration.multi_process_adapter": "watch_lmcache",
    "lmcache.integration.vllm.vllm_multi_process_adapter": "watch_lmcache",
    "lmcache.v1.metadata": "watch_lmcache",
}
# called once the weights are loaded
_SGLANG_HOOK = "sglang.srt.model_executor.model_runner.ModelRunner.configure_kv_cache_dtype"

REQUIRE, REPAIR = "FP8KV_REQUIRE_SCALES", "FP8KV_REPAIR_SCALES"
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")

_ERRORS: set[str] = set()  # that were logged


class ScalesNotUsedError(RuntimeError):
    """FP8KV_REQUIRE_SCALES is set, and not every layer is known to compute with its scales."""


def register_vllm() -> None:
    """Check every model that a vLLM runner loads from now on."""
    for variable in (REQUIRE, REPAIR):
        is_switched_on(variable)
    guard("vllm", _watch_vllm)


def register_sglang() -> None:
    """Check every model that an SGLang runner loads from now on."""
    guard("sglang", _hook_runner)


def _watch_vllm() -> None:
    for name in (*_RUNNERS, *_PARTS):
        if module := sys.modules.get(name):
            _watch(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _hook_runner() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry  # type: ignore[import-not-found]

    HookRegistry.register(_SGLANG_HOOK, lambda _, runner: guard("sglang", lambda: _check("sglang", runner)))


class _Finder(MetaPathFinder):
    """Watches vLLM's modules as soon as they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_watched = fullname in _RUNNERS or fullname in _PARTS
        spec = PathFinder.find_spec(fullname, path) if is_watched else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            guard("vllm", lambda: _watch(module))

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _watch(module: ModuleType) -> None:
    if hasattr(module, "fp8kv"):
        return
    name = module.__name__
    if name in _RUNNERS:
        _watch_runner(getattr(module, _RUNNERS[name]))
    else:
        getattr(import_module("calib.serving.vllm_engine"), _PARTS[name])(module)
    module.fp8kv = True  # type: ignore[attr-defined]


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Put the decorated function in the place of one of `owner`'s, which it gets as its first argument.

    Its parameters have that one's names, by which some are called.
    """
    original = getattr(owner, name)

    def replace(function: Callable[..., Any]) -> None:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, call)

    return replace


def _watch_runner(runner: type[Any]) -> None:
    @wrap(runner, "load_model")
    def load_and_check(load: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        # with dummy weights the real ones, and their scales, come from another worker
        if not (args[:1] == (True,) or kwargs.get("load_dummy_weights")):
            guard("vllm", lambda: _check("vllm", self))
        return result

    if os.environ.get("FP8KV_WATCH") and "execute_model" in vars(runner):
        import_module("calib.watching.harvest").watch_steps(runner)


def _check(engine: str, runner: Any) -> "ScalesInForce":
    report: ScalesInForce = import_module(f"calib.serving.{engine}_worker").check_loaded(runner)
    return report


@contextmanager
def errors_to(report: Callable[[Exception], object]) -> Iterator[None]:
    """Give an error of the block to `report`, and go on: a check must not end a server that works."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  vLLM raises Exception itself for a call that failed
        report(error)


def guard(
    engine: str,
    check: "Callable[[], ScalesInForce | None]",
    task: str = "compare the scales in use with the files'",
) -> None:
    """Log the report of `check`; end the server if it must use every scale and does not."""
    logger, report = logging.getLogger(f"{engine}.fp8kv"), None
    errors: list[Exception] = []
    with errors_to(errors.append):
        if (report := check()) is None:
            return
        line = str(report)
    is_required = is_switched_on(REQUIRE)  # SGLang would swallow its error while it registers plugins
    for error in errors:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        line = f"fp8kv: cannot {task}: {reason:.400}"
        if line in _ERRORS and not is_required:
            return  # an engine may be called a hundred times a second
        _ERRORS.add(line)
    if report and not report.problems:
        logger.info(line)
    elif is_required and not (report and report.awaits_scales):
        raise ScalesNotUsedError(line)
    else:
        logger.warning(line)


def is_switched_on(variable: str) -> bool:
    """Return whether an environment variable says yes; ValueError if it says neither yes nor no."""
    value = os.environ.get(variable, "").strip().lower()
    if value not in (*_ON, *_OFF):
        raise ValueError(
            f"{variable} is '{os.environ[variable]}', which is neither on ({', '.join(_ON)}) nor off "
            f"({', '.join(filter(None, _OFF))}, or empty); set one of these"
        )
    return value in _ON
