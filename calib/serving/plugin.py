"""Plugin of vLLM and SGLang: after loading, each worker reports whether it uses the files' scales.

Entry points `vllm.general_plugins` and `sglang.srt.plugins`. Registering imports the standard library
alone. Everything runs inside `_guard`: an error becomes one line in the log, and the server goes on.
With FP8KV_REQUIRE_SCALES=1, a server ends with that line unless it uses every scale of its checkpoint.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calib.files.stored_scales import StoredScales
    from calib.serving.loaded_scales import EngineLayer, ScalesInForce

# vLLM's runners, which hold a worker's model
_RUNNERS = {
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner",
    "vllm.v1.worker.gpu.model_runner": "GPUModelRunner",
    "vllm.v1.worker.cpu_model_runner": "CPUModelRunner",
}
# called once the weights are loaded
_SGLANG_HOOK = "sglang.srt.model_executor.model_runner.ModelRunner.configure_kv_cache_dtype"
# caches whose scales come from files; other quantised caches make their own
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
_IN_16_BITS = ("auto", "float16", "bfloat16")
_AT_1 = {"k_scale": (1.0,)}  # a layer of SGLang's without a place for scales


class ScalesNotUsedError(RuntimeError):
    """FP8KV_REQUIRE_SCALES is set, and not every layer is known to compute with its scales."""


def register_vllm() -> None:
    """Check every model that a vLLM runner loads from now on."""
    _guard("vllm", _watch_runners)


def register_sglang() -> None:
    """Check every model that an SGLang runner loads from now on."""
    _guard("sglang", _hook_runner)


def _watch_runners() -> None:
    for name in _RUNNERS:
        if module := sys.modules.get(name):
            _watch(module)
    if not any(isinstance(finder, _RunnerFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RunnerFinder())


def _hook_runner() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry  # type: ignore[import-not-found]

    HookRegistry.register(_SGLANG_HOOK, lambda _, runner: _guard("sglang", lambda: _check_sglang(runner)))


class _RunnerFinder(MetaPathFinder):
    """Watches the runners' modules as soon as they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in _RUNNERS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            _guard("vllm", lambda: _watch(module))

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _watch(module: ModuleType) -> None:
    runner = getattr(module, _RUNNERS[module.__name__])
    load = runner.load_model
    if hasattr(load, "fp8kv"):
        return

    @wraps(load)
    def load_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        # with dummy weights the real ones, and their scales, come from another worker
        if not (args[:1] == (True,) or kwargs.get("load_dummy_weights")):
            _guard("vllm", lambda: _check_vllm(self))
        return result

    load_and_check.fp8kv = True  # type: ignore[attr-defined]
    runner.load_model = load_and_check


def _check_vllm(runner: Any) -> "ScalesInForce":
    from vllm.distributed import get_tensor_model_parallel_rank  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    from calib.engines.outcome import Place
    from calib.serving.loaded_scales import compare

    config, model = runner.vllm_config, runner.model_config
    parallel = config.parallel_config
    place = Place(parallel.tensor_parallel_size, current_platform.is_fp8_fnuz())
    # beside a model in an object store lies a directory without its weights
    name = getattr(model, "model_weights", "") or model.model
    stored = _read(name, model.revision, config.load_config)
    layers, rank = [*vllm_layers(runner.model)], get_tensor_model_parallel_rank()
    is_fp8 = config.cache_config.cache_dtype in _FP8
    return compare(layers, stored, place, rank, parallel.pipeline_parallel_size, is_fp8)


def _check_sglang(runner: Any) -> "ScalesInForce | None":
    if getattr(runner, "is_draft_worker", False):
        return None
    from sglang.srt.layers.quantization.kv_cache import is_fp8_fnuz  # type: ignore[import-not-found]
    from sglang.srt.runtime_context import get_parallel  # type: ignore[import-not-found]

    from calib.engines.outcome import Place
    from calib.serving.loaded_scales import compare

    parallel, model = get_parallel(), runner.model_config
    cache = str(runner.kv_cache_dtype).removeprefix("torch.")
    layers = [*sglang_layers(runner.model, cache.startswith("float8"), cache)]
    stored = _read(model.model_path, model.revision, runner.load_config)
    place = Place(parallel.tp_size, is_fp8_fnuz())
    return compare(layers, stored, place, parallel.tp_rank, parallel.pp_size)


def vllm_layers(model: Any) -> "Iterator[EngineLayer]":
    """Yield the decoder's attention layers of a vLLM model."""
    from calib.files.names import layer_of
    from calib.serving.loaded_scales import EngineLayer

    for module in model.modules():
        index = layer_of(getattr(module, "layer_name", ""))
        is_decoder = getattr(module, "attn_type", "decoder") == "decoder"  # not of pictures or sound
        if index is not None and is_decoder and hasattr(module, "_k_scale"):
            k, v, q = (_copies("vllm", module, letter) for letter in "kvq")
            cache = module.kv_cache_dtype
            yield EngineLayer(index, cache in _FP8, k, v, q, _cache_name(cache))


def sglang_layers(model: Any, is_fp8: bool, cache: str = "auto") -> "Iterator[EngineLayer]":
    """Yield the attention layers of an SGLang model; one without a place for scales is at 1.0."""
    from calib.serving.loaded_scales import EngineLayer

    for module in sglang_attention(model).values():
        k, v = (_copies("sglang", module, letter) or _AT_1 for letter in "kv")
        yield EngineLayer(module.layer_id, is_fp8, k, v, cache=_cache_name(cache))


def _copies(engine: str, module: Any, letter: str) -> dict[str, tuple[float, ...]]:
    """Return every copy of a module's scale of K, V or Q; nothing where all are None."""
    from calib.engines.catalogue import find_engine

    names = [name.format(x=letter) for name in find_engine(engine).scale_copies.values()]
    scales = {name: getattr(module, name) for name in names if hasattr(module, name)}
    if all(scale is None for scale in scales.values()):
        return {}
    return {
        name: () if scale is None
        else tuple(scale.flatten().tolist()) if hasattr(scale, "flatten")
        else (float(scale),)
        for name, scale in scales.items()
    }  # fmt: skip


def sglang_attention(model: Any) -> dict[str, Any]:
    """Return SGLang's attention layers by name; of MLA's two, the one that the cache is made for."""
    layers = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "RadixAttention" and not name.endswith(".attn_mha"):
            layers[name] = module
        # a model of transformers has them beside its modules
        instances = getattr(module, "attention_instances", {})
        layers |= {f"{name}.attn.{i}".lstrip("."): layer for i, layer in instances.items()}
    return layers


def _cache_name(dtype: str) -> str:
    return "16 bits" if dtype in _IN_16_BITS else dtype


def _read(model: str, revision: str | None, loading: Any) -> "StoredScales | None":
    """Read the scales of the files that the engine has loaded; None: there are none."""
    from calib.errors import NoScalesError
    from calib.files.stored_scales import read_scales

    if loading.load_format == "dummy":
        raise ValueError("the weights are dummies")
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        # the engine has fetched some of the model's files; no other is fetched for this
        options = {"local_files_only": True, "ignore_patterns": "*", "cache_dir": loading.download_dir}
        directory = Path(snapshot_download(model, revision=revision, **options))
    try:
        return read_scales(directory)
    except NoScalesError:
        return None


def _guard(engine: str, check: "Callable[[], ScalesInForce | None]") -> None:
    """Log the report of `check`; end the server if it must use every scale and does not."""
    logger, report = logging.getLogger(f"{engine}.fp8kv"), None
    try:
        if (report := check()) is None:
            return
        line = str(report)
    except Exception as error:  # noqa: BLE001  a check must not end a server that works
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        line = f"fp8kv: cannot compare the scales in use with the files': {reason:.400}"
    if report and not report.problems:
        logger.info(line)
    elif os.environ.get("FP8KV_REQUIRE_SCALES") == "1":
        raise ScalesNotUsedError(line)
    else:
        logger.warning(line)
