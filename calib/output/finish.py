"""From statistics to a finished output: derive, warn, report, write."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from calib.choices import FormatName
from calib.export import FORMATS
from calib.model.checkpoint import Checkpoint
from calib.output.card import calibration_report
from calib.output.writing import Destination, make_exports, write_output
from calib.recipe import Recipe
from calib.scales.derive import derive_scales
from calib.scales.stats import KVStats
from calib.scales.summary import LayerSummary, summarize, warnings_for


@dataclass(frozen=True)
class Result:
    """What a finished job wrote and measured."""

    output: Path
    directories: dict[FormatName, Path]
    recipe: Recipe  # as resolved
    tokens: int
    layers: list[LayerSummary]
    warnings: list[str]
    backup: Path | None = None  # of the files that were replaced in place
    seconds: dict[str, float] = field(default_factory=dict)  # load, calibrate, write

    @property
    def tokens_per_second(self) -> float | None:
        """Calibration speed; None where statistics were only merged."""
        seconds = self.seconds.get("calibrate")
        return None if seconds is None else self.tokens / seconds

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
            "backup": self.backup and str(self.backup),
            "notes": {name: FORMATS[name].note for name in self.directories},
        }


def finish(
    model_name: str,
    checkpoint: Checkpoint,
    recipe: Recipe,
    stats: KVStats,
    destination: Destination,
    dataset: dict[str, Any],
    warnings: Sequence[str] = (),
    *,
    threads: int | None,
) -> Result:
    """Derive the scales that `recipe` asks for and write them, all or nothing.

    `threads` computed on a CPU in each process; None: not known, or not the same in all runs.

    Raises:
        CalibrationError: a layer saw nothing, only zeros, or NaN/Inf.
        InputError: the output cannot be written.
    """
    scales = derive_scales(stats, recipe)
    exports = make_exports(scales, checkpoint, recipe)
    notes = (note for made in exports.values() for note in made.notes)
    warned = [*dict.fromkeys([*warnings, *warnings_for(stats, scales, recipe), *notes])]
    layers = summarize(stats, scales)
    report = calibration_report(model_name, checkpoint, recipe, dataset, layers, warned, threads)
    written = write_output(destination, exports, checkpoint, recipe, stats, report)
    output, directories = destination.path, written.directories
    return Result(output, directories, recipe, stats.tokens, layers, warned, written.backup)
