"""A value of `--format`, what an export in it adds to a checkpoint, and refusals of what it cannot hold."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from calib.choices import FormatName, FP8Name, Strategy
from calib.engines.catalogue import Engine
from calib.errors import UnsupportedExportError
from calib.files.model_directory import ModelDirectory
from calib.scales.scales import KVScales, LayerScales

Command = Literal["calibrate", "apply", "convert", "repair", "scales_for"]

# what a command calls the settings that a way out changes; it has no flags for the others
_FLAGS: dict[Command, dict[str, str]] = {
    "calibrate": {
        "format": "--format",
        "strategy": "--strategy",
        "reduce": "--reduce",
        "fp8_dtype": "--fp8-dtype",
        "targets": "--targets",
        "center_keys": "--center-keys",
    },
    "apply": {"format": "--format", "strategy": "--strategy"},
    "convert": {"format": "--to", "reduce": "--reduce"},
    # it changes no strategy, but the statistics that it takes may be applied
    "repair": {"format": "--to", "strategy": "fp8kv apply --strategy"},
    "scales_for": {  # arguments, and keys of one
        "format": "format",
        "strategy": "strategy",
        "reduce": "the recipe's export.reduce",
        "fp8_dtype": "the recipe's fp8_dtype",
        "targets": "the recipe's targets",
        "center_keys": "the recipe's center_keys",
    },
}
_LEAVE_OUT = "leave out "
BAKE = "fp8kv bake after fp8kv calibrate --format fp8kv"  # where an engine loads nothing


@dataclass(frozen=True)
class WayOut:
    """A way out of a refusal: other values of a setting, or its default, without the flag."""

    setting: str  # a key of `_FLAGS`
    values: tuple[str, ...] = ()
    purpose: str = ""

    def words(self, flags: Mapping[str, str]) -> str:
        """Return the advice in a command's `flags`; nothing where it has none for the setting."""
        flag, values = flags.get(self.setting), self.values
        if flag != "--format" and "fp8kv" in values:
            # scales in files, and tensors for an engine, are not the statistics that this format holds
            values = tuple(value for value in values if value != "fp8kv")
            if not values:
                return f"a new calibration in format fp8kv{self.purpose}"
        if flag is None:
            return ""
        return f"{flag} {' or '.join(values)}{self.purpose}" if values else f"{_LEAVE_OUT}{flag}"


@dataclass(frozen=True)
class ScaledModel:
    """Scales, the checkpoint that they are of, and the engine that they are for."""

    scales: KVScales
    checkpoint: ModelDirectory
    engine: Engine
    tp_size: int = 1

    @cached_property
    def layers(self) -> dict[str, LayerScales]:
        """The scales of all modules that engines ask about, by prefix of their names on disk."""
        layers = self.scales.expand_shared().items()
        return {self.checkpoint.attention_prefix(module): layer for module, layer in layers}


@dataclass(frozen=True)
class Export:
    """Additions to the source's own files in an output directory."""

    # of the extra shard: float32 [1] or [heads, 1, 1], by name
    tensors: dict[str, Tensor] = field(default_factory=dict)
    config: dict[str, Any] | None = None  # the new config.json; None leaves the source's
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)  # file name -> JSON
    notes: tuple[str, ...] = ()  # what the user must know about this very export
    doubts: tuple[str, ...] = ()  # whether the engine loads it
    flags: str = ""  # that serving needs besides


@dataclass(frozen=True)
class Format:
    """A value of `--format`: how it is built, and what it can hold."""

    engine: str  # in words
    build: Callable[[ScaledModel], Export] | None  # None: all is in the statistics and the recipe
    rules: Engine | None
    serve: str  # the launch command; {path} stands for the output directory
    strategies: tuple[Strategy, ...] = ("tensor",)
    fp8_dtypes: tuple[FP8Name, ...] = ("e4m3fn",)
    reads_q: bool = False
    reads_center: bool = False  # of K
    with_weights: bool = True
    nvfp4: bool = False  # the values of an NVFP4 cache, not FP8 scales
    over_written: float = 1.0  # FP8's scale over the value that is written
    skip_flag: str = ""  # keeps the layers that follow it in 16 bits
    note: str = ""  # what the engine does with the file, where that may surprise
    latent: str = ""  # why it holds no scales of latents (MLA)
    latent_ways: tuple[WayOut | str, ...] = ()  # what serves these instead

    def note_on(self, strategy: Strategy) -> str:
        """Return what may surprise of scales of `strategy` in this format; "" if nothing does."""
        per_head = self.rules.per_head_note if self.rules and strategy == "attn_head" else ""
        return "; ".join(filter(None, (self.note, per_head)))


class FormatRefusal(UnsupportedExportError):
    """A refusal of scales that a format cannot hold; its text names the flags of calibrate."""

    def __init__(self, problem: str, *ways: WayOut | str, name: FormatName | None = None) -> None:
        super().__init__(problem)
        self.problem, self.ways, self.format = problem, ways, name

    def __str__(self) -> str:
        return self.words("calibrate")

    def words(self, command: Command) -> str:
        """Return the problem and the ways out, by the flags of `command`."""
        flags = _FLAGS[command]
        problem = f"{flags['format']} {self.format}: {self.problem}" if self.format else self.problem
        ways = [way if isinstance(way, str) else way.words(flags) for way in self.ways]
        # "use" is said once, before what is used
        advice = ", or ".join(sorted(filter(None, ways), key=lambda way: way.startswith(_LEAVE_OUT)))
        if not advice:  # without ways the problem itself says what to do
            return f"{problem}. Calibrate the model again" if ways else problem
        return f"{problem}. {'L' + advice[1:] if advice.startswith(_LEAVE_OUT) else f'Use {advice}'}"


@contextmanager
def refusals_of(command: Command) -> Iterator[None]:
    """Name the flags of `command` in refusals of formats: an UnsupportedExportError for a FormatRefusal."""
    try:
        yield
    except FormatRefusal as refusal:
        raise UnsupportedExportError(refusal.words(command)) from None
