"""What the plugin does in an SGLang worker: compare the scales in use with the files'.

A module of its own, because it is imported inside SGLang's processes, and vLLM's counterpart inside vLLM's.
"""

from collections.abc import Iterator
from typing import Any

from calib.engines.catalogue import find_engine
from calib.engines.loaded_scales import (
    EngineLayer,
    ScalesInForce,
    compare,
    fingerprint,
    layers_of_files,
    stored_scales,
)
from calib.engines.outcome import Place
from calib.serving.engine_layers import name_cache, read_copies, read_files

_AT_1 = {"k_scale": (1.0,)}  # a layer without a place for scales


def check_loaded(runner: Any) -> ScalesInForce:
    """Compare the layers of a runner, of a model or of a draft, with its files."""
    from sglang.srt.layers.quantization.kv_cache import is_fp8_fnuz  # type: ignore[import-not-found]
    from sglang.srt.runtime_context import get_parallel  # type: ignore[import-not-found]

    parallel, model = get_parallel(), runner.model_config
    cache = str(runner.kv_cache_dtype).removeprefix("torch.")
    layers = [*sglang_layers(runner.model, cache.startswith("float8"), cache)]
    stored = read_files(model.model_path, model.revision, runner.load_config)
    is_draft = bool(getattr(runner, "is_draft_worker", False))
    is_in_checkpoint = is_draft and stored is not None and bool(stored.directory.draft_modules)
    files = layers_of_files(stored, [layer.layer for layer in layers], is_draft=is_in_checkpoint)
    place = Place(parallel.tp_size, is_fp8_fnuz())
    report = compare(layers, files, place, parallel.tp_rank, parallel.pp_size)
    report.fingerprint = fingerprint(stored_scales(layers))
    if is_draft:
        lines = [f"draft: {problem}" for problem in report.problems]
        report.problems, report.notes = (lines, []) if files else ([], lines)
    return report


def sglang_layers(model: Any, is_fp8: bool, cache: str = "auto") -> Iterator[EngineLayer]:
    """Yield the attention layers of an SGLang model; one without a place for scales is at 1.0."""
    engine = find_engine("sglang")
    for module in sglang_attention(model).values():
        k, v = (read_copies(engine, module, letter) or _AT_1 for letter in "kv")
        yield EngineLayer(module.layer_id, is_fp8, k, v, cache=name_cache(cache))


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
