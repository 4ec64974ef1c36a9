"""Matplotlib figures as inline SVG: colours and fonts are the page's, ids are their own."""

import io
import logging
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# colours that stand for the page's own, which change with light, dark and print
INK, MUTED, RULE, PAPER = "#010101", "#020202", "#030303", "#040404"
_CSS = {INK: "currentColor", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "var(--paper)"}
_SERIES = {f"#0101{10 + n}": f"var(--c{n})" for n in range(1, 10)}
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK),
}


def series_color(number: int) -> str:
    """The colour that stands for `var(--cN)` of the page, 0 to 9; 0 is the ink."""
    return INK if number == 0 else f"#0101{10 + number}"


def draw(
    name: str, size: tuple[float, float], label: str, paint: Callable[["Figure"], None]
) -> Markup:
    """An `<svg>` of what `paint` draws.

    Args:
        name: makes the ids of this chart its own; letters, digits and hyphens.
        size: width and height in inches; 72 units of the view box each.
        label: what a screen reader says.
        paint: draws on an empty figure.
    """
    with _matplotlib(name):
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return _inline(written.getvalue(), label)


@contextmanager
def _matplotlib(salt: str) -> Iterator[None]:
    # it says on stderr that it looks for fonts: nobody asked
    logger = logging.getLogger("matplotlib")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from matplotlib import style

        # "default" first: a user's own matplotlibrc is not for this page
        with style.context(["default", {**_STYLE, "svg.hashsalt": salt}]):
            yield
    finally:
        logger.setLevel(before)


def _inline(svg: str, label: str) -> Markup:
    root = ET.fromstring(svg)
    _drop(root, "metadata")
    _drop(root, "style")  # it would apply to the whole page
    referenced = set(re.findall(r"#([\w-]+)[\")]", svg))
    for element in root.iter():
        _clean(element, referenced)
    root.attrib = {
        "class": "chart",
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-label": label,
    }
    return Markup(ET.tostring(root, encoding="unicode"))


def _drop(root: ET.Element, tag: str) -> None:
    for parent in list(root.iter()):
        for child in [c for c in parent if c.tag.endswith("}" + tag)]:
            parent.remove(child)


def _clean(element: ET.Element, referenced: set[str]) -> None:
    element.tag = element.tag.rpartition("}")[2]
    for key in list(element.attrib):
        element.attrib[key.rpartition("}")[2]] = element.attrib.pop(key)
    if element.get("id") not in referenced:
        element.attrib.pop("id", None)
    for key in ("d", "x", "y"):
        if key in element.attrib:
            element.set(key, _rounded(element.attrib[key]))
    if "style" in element.attrib:
        element.set("style", _page_colors(element.attrib["style"]))
    element.text = (element.text or "").strip()
    element.tail = ""


def _rounded(numbers: str) -> str:
    # a hundredth of a unit is less than a pixel
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}", " ".join(numbers.split()))


def _page_colors(style: str) -> str:
    style = re.sub(r"font-family:[^;]*;?\s*", "", style)
    return re.sub(r"#[0-9a-f]{6}", lambda m: {**_CSS, **_SERIES}.get(m[0], m[0]), style)
