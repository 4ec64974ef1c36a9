"""The whole job: find the model, measure, derive, write. The CLI calls this, and so may you."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from calib.attention import AttentionMap, map_attention
from calib.checkpoint import Checkpoint
from calib.choices import FormatName
from calib.data import Batch, CalibrationData, load_data, make_batches, resolve_batch_size
from calib.derive import derive_scales
from calib.devices import input_device
from calib.export import FORMATS, Export, check_format, export
from calib.measure import calibrate
from calib.model import check_positions, find_checkpoint, load_config, load_model, load_tokenizer
from calib.offload.choice import resolve_offload
from calib.offload.layerwise import LayerwiseModel
from calib.offload.run import measure_layers, open_layers
from calib.offload.skeleton import load_skeleton
from calib.output import (
    CALIBRATION_FILE,
    atomic_directory,
    check_output,
    write_checkpoint,
    write_documents,
    write_json,
)
from calib.progress import Progress
from calib.recipe import Recipe
from calib.report import calibration_report, output_card
from calib.scales import KVScales, LayerScales
from calib.stats import KVStats
from calib.stats_file import STATS_FILE, save_stats
from calib.summary import LayerSummary, summarize, warnings_for


@dataclass(frozen=True)
class Result:
    """What a finished job wrote and measured."""

    output: Path
    directories: dict[FormatName, Path]
    recipe: Recipe  # as resolved
    tokens: int
    seconds: dict[str, float]  # load, calibrate, write
    layers: list[LayerSummary]
    warnings: list[str]

    @property
    def tokens_per_second(self) -> float:
        """Calibration speed."""
        return self.tokens / self.seconds["calibrate"]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "output": str(self.output),
            "directories": {name: str(path) for name, path in self.directories.items()},
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "layers": [asdict(layer) for layer in self.layers],
            "warnings": self.warnings,
            "notes": {name: FORMATS[name].note for name in self.directories},
        }


def run(
    model_name: str,
    recipe: Recipe,
    output: Path | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Calibrate `model_name` as `recipe` says and write `output`, all of it or nothing.

    Raises:
        Fp8kvError: anything that a user can put right; see `errors.py`.
    """
    progress, clock = progress or Progress(), _Clock()
    output = output or default_output(model_name, recipe)
    progress.stage("load")
    checkpoint = _check_before_loading(model_name, recipe, output, overwrite)
    loaded = _load(checkpoint, recipe)
    data, recipe = loaded.data, loaded.recipe
    clock.lap("load")

    progress.stage("calibrate")
    progress.total(data.num_tokens)
    stats = _measure(loaded, output, progress)
    scales = derive_scales(stats, recipe)
    clock.lap("calibrate")

    progress.stage("write")
    exports = _exports(scales, checkpoint, recipe)
    notes = (note for made in exports.values() for note in made.notes)
    warnings = [*dict.fromkeys([*data.warnings, *warnings_for(stats, scales, recipe), *notes])]
    layers = summarize(stats, scales)
    report = calibration_report(model_name, recipe, data, layers, warnings)
    directories = _write(output, exports, checkpoint, recipe, stats, report)
    clock.lap("write")
    return Result(output, directories, recipe, stats.tokens, clock.seconds, layers, warnings)


def default_output(model_name: str, recipe: Recipe) -> Path:
    """`./<model>-fp8kv-<strategy>`."""
    base = Path(model_name.rstrip("/").removeprefix("builtin:")).name
    return Path(f"{base}-fp8kv-{recipe.strategy}")


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)
    since: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self.since = now - self.since, now


def _check_before_loading(
    model_name: str, recipe: Recipe, output: Path, overwrite: bool
) -> Checkpoint:
    for name in recipe.export.formats:
        check_format(
            name,
            strategy=recipe.strategy,
            fp8_dtype=recipe.fp8_dtype,
            with_q=recipe.targets == "qkv",
            reduce=recipe.export.reduce,
        )
    checkpoint = find_checkpoint(model_name)
    check_output(output, checkpoint.path, overwrite=overwrite)
    return checkpoint


@dataclass(frozen=True)
class _Loaded:
    model: PreTrainedModel
    layers: LayerwiseModel | None  # where its weights stay in the checkpoint
    data: CalibrationData
    attention: AttentionMap
    recipe: Recipe  # as resolved


def _load(checkpoint: Checkpoint, recipe: Recipe) -> _Loaded:
    config = load_config(checkpoint, recipe)
    check_positions(config, recipe.data.seq_len, "--seq-len")
    recipe = resolve_offload(checkpoint, config, recipe)
    by_layer = recipe.offload == "layerwise"
    loaded: list[PreTrainedModel] = []

    def model() -> PreTrainedModel:
        if not loaded:
            load = load_skeleton if by_layer else load_model
            loaded.append(load(checkpoint, config, recipe))
        return loaded[0]

    data = load_data(recipe.data, load_tokenizer(checkpoint, recipe), model)
    layers = open_layers(model(), checkpoint, recipe) if by_layer else None
    attention = layers.layout.attention if layers else map_attention(model())
    _rehearse(attention, checkpoint, recipe)
    device = layers.device if layers else input_device(model())
    return _Loaded(model(), layers, data, attention, _resolve(recipe, model(), device))


def _rehearse(attention: AttentionMap, checkpoint: Checkpoint, recipe: Recipe) -> None:
    # an export that must fail should do so before hours of calibration
    one = torch.ones(1)
    layers = {name: LayerScales(m.layer_idx, one, one) for name, m in attention.cached.items()}
    _exports(
        KVScales(recipe.strategy, recipe.fp8_dtype, layers, attention.shared), checkpoint, recipe
    )


def _resolve(recipe: Recipe, model: PreTrainedModel, device: torch.device) -> Recipe:
    batch_size = resolve_batch_size(recipe.data, device.type)
    return recipe.model_copy(
        update={
            "device": device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "data": recipe.data.model_copy(update={"batch_size": batch_size}),
        }
    )


def _measure(loaded: _Loaded, output: Path, progress: Progress) -> KVStats:
    recipe = loaded.recipe
    batches = make_batches(loaded.data.samples, int(recipe.data.batch_size), pad_id=0)
    if loaded.layers:
        return measure_layers(loaded.layers, batches, recipe, output, progress)

    def advance(batch: Batch, _: Callable[[], KVStats]) -> None:
        progress.advance(batch.num_tokens)

    return calibrate(loaded.model, batches, recipe, attention=loaded.attention, on_batch=advance)


def _exports(scales: KVScales, checkpoint: Checkpoint, recipe: Recipe) -> dict[FormatName, Export]:
    options = recipe.export
    return {
        name: export(scales, checkpoint, name, reduce=options.reduce, tp_size=options.tp_size)
        for name in options.formats
    }


def _write(
    output: Path,
    exports: dict[FormatName, Export],
    checkpoint: Checkpoint,
    recipe: Recipe,
    stats: KVStats,
    report: dict[str, Any],
) -> dict[FormatName, Path]:
    several = len(exports) > 1
    with atomic_directory(output) as scratch:
        for name, made in exports.items():
            directory = scratch / name if several else scratch
            directory.mkdir(exist_ok=True)
            card = output_card(report, name, output / name if several else output)
            if FORMATS[name].with_weights:
                write_checkpoint(
                    made, checkpoint, directory, weights=recipe.export.weights, readme=card
                )
            else:
                write_documents(made, directory)
                (directory / "README.md").write_text(card)
            save_stats(stats, directory / STATS_FILE)
            write_json(directory / CALIBRATION_FILE, report)
    return {name: output / name if several else output for name in exports}
