"""Refusals of formats: the problem, and the ways out by the flags that a command has."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from calib.choices import FormatName
from calib.errors import UnsupportedExportError

Command = Literal["calibrate", "apply", "convert", "repair"]

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
        if flag == "--to" and "fp8kv" in values:
            # scales that lie in files cannot become the statistics that this format holds
            values = tuple(value for value in values if value != "fp8kv")
            if not values:
                return f"a new calibration in format fp8kv{self.purpose}"
        if flag is None:
            return ""
        return f"{flag} {' or '.join(values)}{self.purpose}" if values else f"{_LEAVE_OUT}{flag}"


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
