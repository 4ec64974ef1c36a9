"""Numbers on axes: few enough not to touch, and without markup."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.ticker import Locator


def plain(value: float, _: Any = None) -> str:
    """A number, without powers of ten as markup."""
    return f"{value:g}"


def percent(value: float, _: Any = None) -> str:
    """A share."""
    return f"{100 * value:g}%"


def log_ticks(low: float, high: float, most: int) -> "Locator":
    """At most about `most` ticks between `low` and `high` of a logarithmic axis."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    decades = math.log10(high / low)
    if decades < 0.7:
        return MaxNLocator(most - 1)
    if 3 * decades < most:
        return LogLocator(subs=(1.0, 2.0, 5.0), numticks=most)
    return LogLocator(numticks=most)
