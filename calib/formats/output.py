"""The output of a calibration: scales derived, a directory for each format, the report; all or nothing."""

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from calib import __version__
from calib.choices import FormatName, Strategy
from calib.data import CalibrationData
from calib.engines.model_classes import architecture
from calib.errors import InputError
from calib.files.atomic import Claim, OnCopied, Placing, atomic_directory
from calib.files.fingerprint import fingerprints
from calib.files.model_directory import ModelDirectory
from calib.files.names import CALIBRATION_FILE, STATS_FILE
from calib.formats import FORMATS, Export, export
from calib.formats.base import FormatRefusal
from calib.formats.card import format_card, written_strategy
from calib.formats.directory import back_up, complete, local_directory, write_checkpoint, write_json
from calib.models.config import takes_media
from calib.models.sources import hub_origin, short_name
from calib.recipe import ExportRecipe, Recipe
from calib.same_model.check import config_summary
from calib.same_model.marks import marks_or_none
from calib.scales.scales import KVScales, layers_html
from calib.scales.stats import MODALITIES, KVStats, derive_scales
from calib.scales.stats_file import save_stats
from calib.scales.summary import LayerSummary, clipped_tokens, modality_line, summarize, warnings_for

_LIBRARIES = ("torch", "transformers", "datasets", "safetensors")


@dataclass(frozen=True)
class Destination:
    """The place of an output."""

    path: Path
    in_place: bool = False  # it is the model's own directory
    overwrite: bool = False  # an earlier output there goes
    on_copied: OnCopied = lambda *_: None
    claim: Claim | None = None  # where it was claimed when the run began


@dataclass(frozen=True)
class CalibrationRecord:
    """The model that scales are written for, the recipe that they follow, and what the report says."""

    model: str  # its name
    checkpoint: ModelDirectory
    recipe: Recipe
    stats: KVStats
    dataset: dict[str, Any]  # the report's facts about the data
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()  # on the data
    threads: int | None = None  # of a CPU in each process; None: not known, or not the same in all runs
    origin: Mapping[str, Any] | None = None  # facts about the model that was measured, where it is another
    draft: KVStats | None = None  # of the layer that predicts extra tokens (MTP)
    drafts_for: str = ""  # the model that a drafter is for, if it is one


@dataclass(frozen=True)
class Result:
    """The output of a finished job, and its measurements."""

    output: Path
    directories: dict[FormatName, Path]
    recipe: Recipe  # as resolved
    tokens: int
    layers: list[LayerSummary]
    warnings: list[str]
    doubts: tuple[str, ...] = ()  # those of `warnings` that --quiet prints too
    backup: Path | None = None  # of the files that were replaced in place
    flags: dict[FormatName, str] = field(default_factory=dict)  # that serving needs besides
    seconds: dict[str, float] = field(default_factory=dict)  # load, calibrate, write
    notes: list[str] = field(default_factory=list)  # what was read, and what to expect
    drafts_for: tuple[str, str] | None = None  # a drafter's model, and what engines call its method

    @property
    def written_layers(self) -> list[LayerSummary]:
        """The layers with the scales, or an NVFP4 cache's values, of the first format."""
        over = FORMATS[next(iter(self.directories))].over_written
        return [replace(row, k_scale=row.k_scale / over, v_scale=row.v_scale / over) for row in self.layers]

    @property
    def tokens_per_second(self) -> float | None:
        """The calibration speed; None where statistics were only merged."""
        seconds = self.seconds.get("calibrate")
        return None if seconds is None else self.tokens / seconds

    def _repr_html_(self) -> str:
        names = ("k_amax", "v_amax", "k_scale", "v_scale")
        figures = {
            (row.module, f"{name[0].upper()} {name[2:]}"): torch.tensor(getattr(row, name))
            for row in self.written_layers
            for name in names
        }
        layers = {row.module: row.layer_idx for row in self.layers}
        warnings = (f"warning: {warning}" for warning in self.warnings)
        return layers_html(f"Written to {self.output}", layers, figures, [*warnings, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        strategy = written_strategy(self.recipe.strategy, self.recipe.export.reduce)
        return {
            "output": str(self.output),
            "directories": {name: str(path) for name, path in self.directories.items()},
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "layers": [asdict(layer) for layer in self.written_layers],
            "warnings": self.warnings,
            "expected": self.notes,
            "backup": self.backup and str(self.backup),
            "notes": {name: FORMATS[name].note_on(strategy) for name in self.directories},
        }


def default_output(model_name: str, strategy: Strategy) -> Path:
    """Return `./<model>-fp8kv-<strategy>`."""
    return Path(f"{short_name(model_name)}-fp8kv-{strategy}")


def check_in_place(model_name: str, options: ExportRecipe) -> Path:
    """Return the directory of `model_name`; an InputError if scales cannot be added to it."""
    path, formats = local_directory(model_name), options.formats
    if len(formats) > 1 or not FORMATS[formats[0]].with_weights:
        raise InputError(
            f"--in-place writes one format that is a checkpoint, not {', '.join(formats)}; use -o"
        )
    if options.weights != "link":
        raise InputError(f"--in-place leaves the weights where they are; '{options.weights}' needs -o")
    return path


def make_exports(
    scales: KVScales, source: ModelDirectory, options: ExportRecipe, draft: KVScales | None = None
) -> dict[FormatName, Export]:
    """Return what each of the recipe's formats adds; refuse what one cannot hold, and name it."""
    exports = {}
    for name in options.formats:
        try:
            exports[name] = export(
                scales, source, name, reduce=options.reduce, tp_size=options.tp_size, draft=draft
            )
        except FormatRefusal as refusal:
            refusal.format = name
            raise
    return exports


def write_output(record: CalibrationRecord, destination: Destination) -> Result:
    """Derive the scales that the recipe asks for and write them, all or nothing."""
    recipe, stats, checkpoint = record.recipe, record.stats, record.checkpoint
    scales = derive_scales(stats, recipe)
    draft = derive_scales(record.draft, recipe) if record.draft else None
    exports = make_exports(scales, checkpoint, recipe.export, draft)
    doubts = tuple(doubt for each in exports.values() for doubt in each.doubts)
    common = [*record.warnings, *warnings_for(stats, scales, recipe, takes_media(checkpoint.config))]
    notes_by_format = [note for each in exports.values() for note in each.notes]
    warnings = [*dict.fromkeys([*common, *notes_by_format, *doubts])]
    layers, rows = summarize(stats, scales), summarize(record.draft, draft) if record.draft and draft else []
    drafts = (f"{x.module} drafts tokens: K amax {x.k_amax:.4g}, V amax {x.v_amax:.4g}" for x in rows)
    notes = [*record.notes, *drafts]
    notes += filter(None, (modality_line(stats, scales.strategy, name) for name in MODALITIES[1:]))
    if expected := clipped_tokens(stats, scales):
        first = recipe.data.skip_first
        notes.append(expected.line + (f" (of those after the first {first} of a sample)" if first else ""))
    report = _report(record, rows) | {
        "layers": [asdict(layer) for layer in layers],
        "warnings": warnings,
        "expected": notes,
        "clip_chance": (expected and expected.by_layer) or None,
        **(record.origin or {"marks": marks_or_none(checkpoint, stats.layers)}),
    }
    output, strategy = destination.path, written_strategy(recipe.strategy, recipe.export.reduce)
    directories = _places(exports, output)
    cards = {}
    for name, part in exports.items():
        own = [*dict.fromkeys([*common, *part.notes, *part.doubts])]
        cards[name] = format_card(record.model, name, directories[name], strategy, part.flags, own, report)

    def add_files(directory: Path) -> None:
        save_stats(stats, directory / STATS_FILE)
        write_json(directory / CALIBRATION_FILE, report)

    weights: Placing = "keep" if destination.in_place else recipe.export.weights
    backup = write_exports(exports, checkpoint, destination, cards, add_files, weights)
    return Result(
        output, directories, recipe, stats.tokens, layers, warnings, doubts, backup,
        {name: each.flags for name, each in exports.items()}, {}, notes, report.get("drafts_for"),
    )  # fmt: skip


def _report(record: CalibrationRecord, drafts: Sequence[LayerSummary]) -> dict[str, Any]:
    """Return what the saved report says of the run; its recipe gives the same scales."""
    text, modalities = record.stats.text, record.stats.amax_by_modality()
    method = "eagle3" if "Eagle3" in str(architecture(record.checkpoint.config)) else "eagle"
    return {
        "fp8kv_calibration": 1,
        "model": record.model,
        "hub": hub_origin(record.checkpoint.path),
        **fingerprints(record.checkpoint),
        "config": config_summary(record.checkpoint.config),
        "recipe": record.recipe.model_dump(mode="json"),
        "dataset": record.dataset | (text.to_json() if text else {}),
        "versions": versions(),
        "threads": record.threads,
        **({"modalities": modalities} if modalities else {}),
        **({"drafts": [asdict(row) for row in drafts]} if drafts else {}),
        **({"drafts_for": (record.drafts_for, method)} if record.drafts_for else {}),
    }


def dataset_facts(data: CalibrationData) -> dict[str, Any]:
    """Return the report's facts about the data."""
    return {
        "source": data.source,
        "fingerprint": data.fingerprint,
        "documents": data.documents,
        "samples": len(data.samples),
        "tokens": data.num_tokens,
        "unread_tokens": data.unread,
        "columns": {**data.columns},  # as found; the source names the split
        **data.media,
    }


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    """Return versions of Python, of what every result depends on, and of `packages`; of those installed."""
    numbers = {"python": platform.python_version(), "fp8kv": __version__}
    for name in (*_LIBRARIES, *packages):
        with suppress(PackageNotFoundError):  # beside an engine, some are not
            numbers[name] = version(name)
    return numbers


def write_exports(
    exports: Mapping[FormatName, Export],
    checkpoint: ModelDirectory,
    destination: Destination,
    cards: Mapping[FormatName, str],
    add_files: Callable[[Path], None],
    weights: Placing = "link",
) -> Path | None:
    """Write exports, cards and what `add_files` adds, all or nothing; return the backup of replaced files."""
    output = destination.path
    with atomic_directory(output, overwrite=destination.overwrite, claim=destination.claim) as scratch:
        for name, place in _places(exports, output).items():
            part = place.relative_to(output)
            directory = scratch / part
            directory.mkdir(exist_ok=True)
            write_checkpoint(
                exports[name],
                checkpoint,
                directory,
                weights=weights if FORMATS[name].with_weights else None,
                readme=cards[name],
                # by the part of the output too: each part has a copy of a file
                on_copied=lambda name, *sizes, part=part: destination.on_copied(f"{part / name}", *sizes),
            )
            add_files(directory)
        checkpoint.check_unchanged()
        if not destination.in_place:
            return None
        complete(scratch, output)
        return back_up(output, scratch)


def _places(exports: Mapping[FormatName, Export], output: Path) -> dict[FormatName, Path]:
    """Return the directory of each format: the output itself, where there is one alone."""
    return {name: output / name if len(exports) > 1 else output for name in exports}
