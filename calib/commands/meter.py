"""How far a stage of a job is, how fast it goes, and how long the rest takes."""

from collections import deque
from collections.abc import Callable
from typing import Any

from calib.files.text import plain, show_duration

Clock = Callable[[], float]  # seconds

_WINDOW = 60.0  # seconds that a rate is of: the first batch of all is slow, and files differ


class Meter:
    """One stage, from now on."""

    def __init__(self, name: str, total: float | None, unit: str, clock: Clock) -> None:
        self.name, self.total, self.unit, self.detail = name, total, unit, ""
        self.done = 0.0
        self._clock = clock
        self._seen = deque([(clock(), 0.0)])  # when how much was done
        self._since = self._seen[0][0]

    def advance(self, amount: float) -> None:
        """Count what was done."""
        self.done += amount
        now = self._clock()
        self._seen.append((now, self.done))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW:
            self._seen.popleft()

    @property
    def elapsed(self) -> float:
        """Seconds since the stage began."""
        return self._clock() - self._since

    @property
    def rate(self) -> float | None:
        """Units per second of late; None before there is one."""
        (before, less), (now, more) = self._seen[0], self._seen[-1]
        return (more - less) / (now - before) if more > less and now > before else None

    @property
    def left(self) -> float | None:
        """Seconds to the end of the stage; None where nobody can tell."""
        if self.total is None or self.rate is None:
            return None
        waited = self._clock() - self._seen[-1][0]
        return max(0.0, (self.total - self.done) / self.rate - waited)

    def to_json(self, event: str) -> dict[str, Any]:
        """The object that `--progress json` prints."""
        return {
            "event": event,
            "stage": self.name,
            "done": round(self.done),
            "total": self.total,
            "unit": self.unit or None,
            "rate": _rounded(self.rate),
            "eta_s": _rounded(self.left),
            "elapsed_s": _rounded(self.elapsed),
        }

    def line(self) -> str:
        """What a log is told: `calibrate: 12,288 of 71,168 tokens, 1,512 tokens/s, 39 s left`."""
        where = f" ({self.detail})" if self.detail else ""
        return plain(f"{self.name}{where}: {self}")

    def __str__(self) -> str:
        """The figures of the stage; its time where it has none."""
        left = "" if self.left is None else f"{show_duration(self.left)} left"
        said = filter(None, [self._amount(), self._speed(), left])
        return ", ".join(said) or show_duration(self.elapsed)

    def _amount(self) -> str:
        if self.unit == "bytes":
            of = "" if self.total is None else f" of {self.total / 1e9:.1f}"
            return f"{self.done / 1e9:.1f}{of} GB"
        of = "" if self.total is None else f" of {self.total:,.0f}"
        return f"{self.done:,.0f}{of} {self.unit}" if self.unit else ""

    def _speed(self) -> str:
        if self.rate is None:
            return ""
        rate, unit = (self.rate / 1e6, "MB") if self.unit == "bytes" else (self.rate, self.unit)
        return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"


def _rounded(x: float | None) -> float | None:
    return None if x is None else round(x, 3)
