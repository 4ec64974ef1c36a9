"""Plugin of vLLM and SGLang: after loading, each worker says whether it uses the files' scales.

Entry points `vllm.general_plugins` and `sglang.srt.plugins`. Registering imports the standard
library alone and never raises. With FP8KV_REQUIRE_SCALES=1 a server that does not use every scale
of its checkpoint does not start.
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calib.serving.in_force import LayerInForce, Report

# where vLLM's runners are, which hold a worker's model
_RUNNERS = {
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner",
    "vllm.v1.worker.gpu.model_runner": "GPUModelRunner",
    "vllm.v1.worker.cpu_model_runner": "CPUModelRunner",
}
# called once the weights are loaded
_SGLANG_HOOK = "sglang.srt.model_executor.model_runner.ModelRunner.configure_kv_cache_dtype"
# caches whose scales come from files; others make their own at run time
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")


class ScalesNotUsedError(RuntimeError):
    """FP8KV_REQUIRE_SCALES is set, and a layer computes with another scale than the files'."""


def register_vllm() -> None:
    """Check every model that a vLLM runner loads from here on."""
    for name in _RUNNERS:
        if name in sys.modules:
            _watch(sys.modules[name])
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def register_sglang() -> None:
    """Check every model that an SGLang runner loads from here on."""
    from sglang.srt.plugins.hook_registry import HookRegistry  # type: ignore[import-not-found]

    HookRegistry.register(_SGLANG_HOOK, lambda _, runner: _check_sglang(runner))


class _AfterImport(MetaPathFinder):
    """Watches the runners' modules as soon as they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _RUNNERS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), _watch(module))  # type: ignore[method-assign, assignment, func-returns-value]
        return spec


def _watch(module: ModuleType) -> None:
    runner = getattr(module, _RUNNERS[module.__name__], None)
    load = getattr(runner, "load_model", None)
    if runner is None or load is None or hasattr(load, "fp8kv"):
        return

    @wraps(load)
    def load_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        _check_vllm(self)
        return result

    load_and_check.fp8kv = True  # type: ignore[attr-defined]
    runner.load_model = load_and_check


def _check_vllm(runner: Any) -> None:
    def check() -> "Report":
        from vllm.distributed import (  # type: ignore[import-not-found]
            get_tensor_model_parallel_rank,
        )
        from vllm.platforms import current_platform  # type: ignore[import-not-found]

        place = (runner.vllm_config.parallel_config.tensor_parallel_size,
                 current_platform.is_fp8_fnuz(), get_tensor_model_parallel_rank())  # fmt: skip
        config = runner.model_config
        return _compare(vllm_layers(runner.model), config.model, config.revision, *place)

    _say("vllm", check)


def _check_sglang(runner: Any) -> None:
    def check() -> "Report":
        from sglang.srt.layers.quantization.kv_cache import (  # type: ignore[import-not-found]
            is_fp8_fnuz,
        )
        from sglang.srt.runtime_context import get_parallel  # type: ignore[import-not-found]

        parallel, config = get_parallel(), runner.model_config
        layers = sglang_layers(runner.model, "float8" in str(runner.kv_cache_dtype))
        place = (parallel.tp_size, is_fp8_fnuz(), parallel.tp_rank)
        return _compare(layers, config.model_path, config.revision, *place)

    if not runner.is_draft_worker:
        _say("sglang", check)


def vllm_layers(model: Any) -> "Iterator[LayerInForce]":
    """The decoder's attention layers of a model of vLLM's."""
    from calib.scalefiles.names import layer_of
    from calib.serving.in_force import LayerInForce

    for module in model.modules():
        index = layer_of(getattr(module, "layer_name", ""))
        # others are of pictures and sound
        is_decoder = getattr(module, "attn_type", "decoder") == "decoder"
        if index is not None and is_decoder and hasattr(module, "_k_scale"):
            k, v = (getattr(module, x).flatten().tolist() for x in ("_k_scale", "_v_scale"))
            yield LayerInForce(index, module.kv_cache_dtype in _FP8, tuple(k), tuple(v))


def sglang_layers(model: Any, is_fp8: bool) -> "Iterator[LayerInForce]":
    """The attention layers of a model of SGLang's; one without a place for scales is at 1.0."""
    from calib.serving.in_force import LayerInForce

    for module in model.modules():
        if type(module).__name__ == "RadixAttention":
            k, v = (getattr(module, name) for name in ("k_scale_float", "v_scale_float"))
            k, v = (1.0 if scale is None else scale for scale in (k, v))
            yield LayerInForce(module.layer_id, is_fp8, (k,), (v,))


def _compare(
    layers: "Iterator[LayerInForce]", model: str, revision: str | None, ranks: int, fnuz: bool,
    rank: int,
) -> "Report":  # fmt: skip
    from calib.errors import NoScalesError
    from calib.scalefiles.reading import read_scales
    from calib.serving.in_force import compare
    from calib.verify.result import Place

    try:
        found = read_scales(_directory(model, revision))
    except NoScalesError:
        found = None
    return compare([*layers], found, Place(ranks, fnuz), rank)


def _directory(model: str, revision: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def _say(engine: str, check: "Callable[[], Report]") -> None:
    """Log what `check` finds; end the server if it has to use every scale and does not."""
    logger = logging.getLogger(f"{engine}.fp8kv")
    try:
        report = check()
        line, is_good = str(report), not report.problems
    except Exception as error:  # noqa: BLE001  a check must not end a server that works
        line, is_good = f"fp8kv: cannot compare the scales in use with the files': {error}", False
    if is_good:
        logger.info(line)
    elif os.environ.get("FP8KV_REQUIRE_SCALES") == "1":
        raise ScalesNotUsedError(line)
    else:
        logger.warning(line)
