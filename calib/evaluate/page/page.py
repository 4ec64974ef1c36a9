"""`report.html`, one file that loads nothing and runs nothing, `report.md`, and all files written."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from math import inf, log
from pathlib import Path
from statistics import fmean
from typing import Any

from calib.choices import REFERENCE
from calib.errors import InputError
from calib.evaluate.page.tables import (
    FIGURES,
    Cell,
    figures,
    long_tables,
    other_text_tables,
    summary_lines,
    task_table,
    variants_table,
)
from calib.evaluate.report import REPORT_FILE, Report, Row
from calib.evaluate.verdict import can_be_served
from calib.files.atomic import claimed
from calib.files.strict_json import json_text
from calib.files.text import plain, show_layers, show_number
from calib.progress import WRITTEN
from calib.scales.plot import check_can_draw

# control characters but white space, halves of characters, and what is not a character
_INVISIBLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_MARKUP = re.compile(r"([\\`*_|<>\[\]])")
# of an SVG file: what an element of a page does without, and what comes before an ID
_SVG_FILE = re.compile(r"<style.*?</style>| xmlns(?::xlink)?=\"[^\"]*\"")
_SVG_ID = re.compile(r'( id="|href="#|url\(#)')
_LEAST = 1e-30  # KL: what is smaller is not drawn


def render_html(report: Report) -> str:
    """Return the page; names and texts in the report may be anybody's."""
    headings = variants_table(report).headings

    def shown_figures(row: Row) -> list[Cell]:
        return [cell for name, cell in zip(FIGURES, figures(row), strict=True) if name in headings]

    facts = {"figures": figures, "shown_figures": shown_figures, "headings": headings}
    return _render("report.html", report, **facts, variants=_variants(report), **_charts(report))


def render_markdown(report: Report) -> str:
    """Return the text of `report.md`."""
    return _render("report.md", report, summary=summary_lines(report), variants=variants_table(report))


def _render(template: str, report: Report, **facts: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("calib.evaluate.page"),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=template.endswith(".md"),
    )
    numbers = count(1)
    environment.filters |= {
        "number": show_number,
        "layers": show_layers,
        "mean": fmean,
        "escape_markdown": _escape_markdown,
        "inline": lambda svg: _inline_svg(svg, f"chart{next(numbers)}-"),
    }
    facts |= {"report": report, "other_texts": other_text_tables(report), "tasks": task_table(report)}
    facts["long"], *facts["positions"] = long_tables(report)
    return environment.get_template(template).render(facts)


def _visible(value: Any) -> Any:
    """Replace invisible characters in text that a template prints; markup of a macro is left."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return _INVISIBLE.sub("\ufffd", value) if is_text else value


def _escape_markdown(text: str) -> str:
    # names come from directories that others made
    return plain(" ".join(_MARKUP.sub(r"\\\1", text).split()))


def _inline_svg(svg: str, prefix: str) -> str:
    """Return a file of matplotlib's as an element of a page, where its IDs are unique."""
    return _SVG_ID.sub(rf"\1{prefix}", _SVG_FILE.sub("", svg[svg.index("<svg") :]))


def _charts(report: Report) -> dict[str, Any]:
    # matplotlib says on stderr that it looks for fonts, when it is imported too: nobody asked
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from calib.evaluate.page.charts import charts

        return charts(report)
    finally:
        logger.setLevel(level)


def _variants(report: Report) -> dict[str, Any]:
    """Return the rows of variants in groups, and percentages of a width where their KL is drawn."""
    # controls, and a floor far below, would leave no room to tell the others apart
    drawn = [row.kl for row in report.variants.values() if row.kind not in ("control", REFERENCE)]
    ends = [end for kl in drawn for _, end in kl if _LEAST < end < inf] or [1.0]
    low, high = min(ends), max(*ends, 1.01 * min(ends))

    def place(kl: float) -> float:
        return round(100 * log(min(max(low, kl), high) / low) / log(high / low), 1)

    groups: dict[tuple[int, str], list[Any]] = {}
    for name, row in report.variants.items():
        group = groups.setdefault(_group(name, row, report.bytes_per_token["16bit"]), [])
        group.append((name, row, {end: place(kl) for end, kl in row.kl}))
    rows = [(title, groups[number, title]) for number, title in sorted(groups)]
    return {"groups": rows, "low": low, "high": high, "floor": place(report.noise_floor)}


def _group(name: str, row: Row, whole: int) -> tuple[int, str]:
    """Return place and title of a group: by bytes, those with the most first."""
    if row.kind in ("control", REFERENCE):
        return 100, "reference and controls"
    if row.kind == "given":
        return 0, "given with --scales"
    if not (row.bytes_per_token and can_be_served(name, row)):
        return 99, "for comparison"
    # scales of tokens and blocks take up to two
    bits = 2 * int(8 * row.bytes_per_token / whole)
    return 16 - bits, f"about {bits} bits a value"


@contextmanager
def report_place(directory: Path | None, *, overwrite: bool) -> Iterator[Callable[[Report], list[str]]]:
    """Claim the directory of a report, if there shall be one; yield what writes it and says why it could not.

    InputError for a file, a directory that holds something else, or a report without `overwrite`, one that
    cannot be written, and no matplotlib.
    """
    if directory is None:
        yield lambda _: []
        return
    with claimed(directory, overwrite=True):
        check_can_draw("a report")
        names = [path.name.removeprefix(".") for path in directory.glob("*")]
        if strange := next((name for name in names if name not in _FORMS), None):
            raise InputError(f"'{directory}' holds '{strange}', which is not a report; give another --output")
        if names and not overwrite:
            advice = "add --overwrite to measure again, or choose another -o"
            raise InputError(f"the report '{directory}' is finished; {advice}")
        if directory.exists() and not os.access(directory, os.W_OK):
            raise InputError(f"cannot write '{directory}': Permission denied; choose another output")
        yield partial(write_report, directory=directory)


def write_report(report: Report, directory: Path) -> list[str]:
    """Write all files of a report, in place of an earlier one, or none: then return why."""
    texts = {directory / name: form(report) for name, form in _FORMS.items()}
    scratch = {file: file.with_name(f".{file.name}") for file in texts}
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            scratch[file].write_text(text, encoding="utf-8", errors="replace")
        for file, written in scratch.items():
            written.replace(file)
    except OSError as error:
        problem = f"cannot write '{directory}': {error.strerror or error}; no file of a report was replaced"
        return [f"{problem}; choose another output"]
    finally:
        with suppress(OSError):
            for written in scratch.values():
                written.unlink(missing_ok=True)
            if is_new:
                directory.rmdir()  # where nothing was written
    WRITTEN.append(directory)
    return []


_FORMS: dict[str, Callable[[Report], str]] = {
    REPORT_FILE: lambda report: json_text(report.to_json(), indent=2) + "\n",
    "report.md": render_markdown,
    "report.html": render_html,
}
