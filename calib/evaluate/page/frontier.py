"""KL against bytes per token: every cache that was measured, and which no other one beats."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from calib.evaluate.page.plots import SIZE, Picture, draw, log_axis, plain_number
from calib.evaluate.report import Figure as Interval

GIVEN = "given"  # in place of a name that others chose
_LETTER, _LINE = 0.018, 0.075  # width and height of a letter, of the axes


class Point(NamedTuple):
    """One cache."""

    name: str  # ours: what others named is not drawn
    share: float  # its bytes beside 16 bits
    kl: Interval
    is_subject: bool = False


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points that no other one beats in both bytes and KL, by their bytes."""
    found: list[Point] = []
    for point in sorted(points, key=lambda each: (each.share, each.kl.value)):
        if not found or point.kl.value < found[-1].kl.value:
            found.append(point)
    return found


def kl_by_bytes(points: Sequence[Point], floor: float) -> Picture:
    """Mean KL with its interval against bytes; steps join the frontier, names where they fit."""
    shown = [each for each in points if 0 < each.kl.low <= each.kl.high < math.inf]
    best = frontier(shown)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        shares = [each.share for each in shown]
        # beyond the largest lie the names
        end = max(shares) + 0.35 * (max(shares) - min(shares) + 0.1)
        axes.step(
            [*(each.share for each in best), end],
            [*(each.kl.value for each in best), best[-1].kl.value],
            where="post", color="C1", linewidth=1.0, zorder=1,
        )  # fmt: skip
        for each in shown:
            _point(axes, each, is_best=each in best)
        if floor > 0:
            axes.axhline(floor, color="C8", linestyle=(0, (2, 2)), linewidth=1.0)
        axes.set_xlim(min(shares) - 0.02, end)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.set_xlabel("bytes per token, beside a 16-bit cache")
        log_axis(axes, "KL, nats per token", plain_number)
        named = sorted(shown, key=lambda p: (*_importance(p), p not in best, p.kl.value))
        _name(axes, named)

    return draw(SIZE, paint)


def _importance(point: Point) -> tuple[bool, bool]:
    return not point.is_subject, point.name != GIVEN


def _point(axes: Axes, point: Point, *, is_best: bool) -> None:
    color = "C2" if point.is_subject else "C1" if is_best else "C8"
    axes.vlines(point.share, point.kl.low, point.kl.high, color=color, linewidth=1.2)
    fill = color if is_best or point.is_subject else "none"
    marker = "D" if point.is_subject else "o"
    axes.plot(point.share, point.kl.value, marker, color=color, markerfacecolor=fill, markersize=6)


def _name(axes: Axes, points: Sequence[Point]) -> None:
    """Write names beside points, those of the first ones first, as long as there is room."""
    to_axes = (axes.transData + axes.transAxes.inverted()).transform
    places = [to_axes((each.share, each.kl.value)) for each in points]
    taken: list[tuple[float, float, float]] = []  # left, right, height
    for point, (x, y) in zip(points, places, strict=True):
        width = _LETTER * len(point.name)
        is_right = x + width < 1
        left = x if is_right else x - width
        if any(abs(y - b) < _LINE and left < z and a < left + width for a, z, b in taken):
            continue
        taken.append((left, left + width, y))
        axes.annotate(
            point.name, (point.share, point.kl.value), xytext=(7 if is_right else -7, 6),
            textcoords="offset points", fontsize=9, verticalalignment="center",
            horizontalalignment="left" if is_right else "right",
        )  # fmt: skip
