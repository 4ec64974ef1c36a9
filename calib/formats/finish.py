"""From statistics to an output: scales, each format's directory, the report; all or nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from calib.choices import FormatName, Strategy
from calib.files.atomic import Claim, OnCopied, atomic_directory
from calib.files.model_directory import ModelDirectory
from calib.files.names import CALIBRATION_FILE, STATS_FILE
from calib.formats import FORMATS, Command, Export, export
from calib.formats.card import calibration_report, output_card
from calib.formats.checkpoint_directory import write_checkpoint, write_json
from calib.formats.in_place import back_up, complete
from calib.recipe import ExportRecipe, Recipe
from calib.same_model.marks import marks_or_none
from calib.scales.clipping import clipped_tokens
from calib.scales.notebook import layers_html
from calib.scales.scales import KVScales
from calib.scales.stats import KVStats, derive_scales
from calib.scales.stats_file import save_stats
from calib.scales.summary import LayerSummary, summarize, warnings_for


@dataclass(frozen=True)
class Destination:
    """Where an output goes."""

    path: Path
    in_place: bool = False  # it is the model's own directory
    overwrite: bool = False  # an earlier output there goes
    on_copied: OnCopied = lambda name, more, size: None
    claim: Claim | None = None  # where it was claimed when the run began


@dataclass(frozen=True)
class Result:
    """What a finished job wrote and measured."""

    output: Path
    directories: dict[FormatName, Path]
    recipe: Recipe  # as resolved
    tokens: int
    layers: list[LayerSummary]
    warnings: list[str]
    doubts: tuple[str, ...] = ()  # those of `warnings` whether engines load the scales
    backup: Path | None = None  # of the files that were replaced in place
    flags: dict[FormatName, str] = field(default_factory=dict)  # that serving needs besides
    seconds: dict[str, float] = field(default_factory=dict)  # load, calibrate, write
    notes: list[str] = field(default_factory=list)  # what was read, and what to expect

    @property
    def written_layers(self) -> list[LayerSummary]:
        """The layers with the scales, or an NVFP4 cache's values, of the first format."""
        over = FORMATS[next(iter(self.directories))].over_written
        return [replace(row, k_scale=row.k_scale / over, v_scale=row.v_scale / over) for row in self.layers]

    @property
    def tokens_per_second(self) -> float | None:
        """Calibration speed; None where statistics were only merged."""
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
        """The object that `--json` prints."""
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
            "notes": {name: FORMATS[name].note for name in self.directories},
        }


def default_output(model_name: str, strategy: Strategy) -> Path:
    """`./<model>-fp8kv-<strategy>`."""
    base = Path(model_name.rstrip("/").removeprefix("builtin:")).name
    return Path(f"{base}-fp8kv-{strategy}")


def make_exports(
    scales: KVScales, source: ModelDirectory, options: ExportRecipe, by: Command = "calibrate"
) -> dict[FormatName, Export]:
    """Each of the recipe's formats, with all that it adds; refuses what one cannot hold."""
    return {
        name: export(scales, source, name, reduce=options.reduce, tp_size=options.tp_size, by=by)
        for name in options.formats
    }


def finish(
    model_name: str,
    checkpoint: ModelDirectory,
    recipe: Recipe,
    stats: KVStats,
    destination: Destination,
    dataset: dict[str, Any],
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
    *,
    threads: int | None,
    origin: Mapping[str, Any] | None = None,
) -> Result:
    """Derive the scales that `recipe` asks for and write them, all or nothing.

    `notes` are on the data, and `warnings` too; the result says what to expect besides.
    `threads` computed on a CPU in each process; None: not known, or not the same in all runs.
    `origin` is the report's facts about the model that was measured, where it is not `model_name`.
    """
    scales = derive_scales(stats, recipe)
    exports = make_exports(scales, checkpoint, recipe.export)
    of_formats = (note for made in exports.values() for note in made.notes)
    doubts = tuple(doubt for made in exports.values() for doubt in made.doubts)
    of_scales = warnings_for(stats, scales, recipe)
    warned = [*dict.fromkeys([*warnings, *of_scales, *of_formats, *doubts])]
    layers = summarize(stats, scales)
    dataset = dataset | (stats.text.to_json() if stats.text else {})
    expected = clipped_tokens(stats, scales)
    skipped = recipe.data.skip_first
    of_others = f" (of those after the first {skipped} of a sample)" * bool(skipped)
    notes = [*notes, *([expected.line + of_others] if expected else [])]
    report = calibration_report(model_name, checkpoint, recipe, dataset, layers, warned, threads)
    report |= {"expected": notes, "clip_chance": (expected and expected.by_layer) or None}
    report |= origin or {"marks": marks_or_none(checkpoint, stats.layers)}
    parts = {name: name if len(exports) > 1 else "" for name in exports}
    directories = {name: destination.path / part for name, part in parts.items()}
    backup = _write(exports, parts, report, checkpoint, recipe, stats, destination)
    flags = {name: made.flags for name, made in exports.items()}
    return Result(
        destination.path, directories, recipe, stats.tokens, layers, warned, doubts, backup, flags,
        notes=notes,
    )  # fmt: skip


def _naming(part: str, on_copied: OnCopied) -> OnCopied:
    """Report copies into a part of the output by its name too: each part has a copy of a file."""
    return lambda name, more, size: on_copied(str(PurePosixPath(part, name)), more, size)


def _write(
    exports: dict[FormatName, Export],
    parts: dict[FormatName, str],
    report: dict[str, Any],
    checkpoint: ModelDirectory,
    recipe: Recipe,
    stats: KVStats,
    destination: Destination,
) -> Path | None:
    """Write each export into its part of the output; where replaced files are kept is returned."""
    output, in_place = destination.path, destination.in_place
    weights = "keep" if in_place else recipe.export.weights
    with atomic_directory(output, overwrite=destination.overwrite, claim=destination.claim) as scratch:
        for name, made in exports.items():
            directory = scratch / parts[name]
            directory.mkdir(exist_ok=True)
            write_checkpoint(
                made, checkpoint, directory,
                weights=weights if FORMATS[name].with_weights else None,
                readme=output_card(report, name, output / parts[name], made.flags),
                on_copied=_naming(parts[name], destination.on_copied),
            )  # fmt: skip
            save_stats(stats, directory / STATS_FILE)
            write_json(directory / CALIBRATION_FILE, report)
        checkpoint.check_unchanged()
        if in_place:
            complete(scratch, output)
        return back_up(output, scratch) if in_place else None
