"""What the plugin does in an SGLang worker: compare the scales in use with the files'."""

from typing import Any

from calib.engines.loaded_scales import ScalesInForce, compare, fingerprint, layers_of_files, stored_scales
from calib.engines.outcome import Place
from calib.serving.engine_layers import read_files, sglang_layers


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
