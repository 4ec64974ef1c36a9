"""`report.html`, one file that loads nothing and runs nothing; all files of a report."""

import logging
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from calib.choices import REFERENCE
from calib.errors import InputError
from calib.evaluate.page.histograms import Axis
from calib.evaluate.page.markdown import figures, markdown, task_table
from calib.evaluate.page.other_tables import OTHER_HEADINGS, other_tables
from calib.evaluate.report import REPORT_FILE, Continuation, Report, Row
from calib.evaluate.verdict import can_be_served
from calib.files.strict_json import json_text
from calib.files.text import show_number
from calib.progress import WRITTEN
from calib.scales.plot import check_can_draw

# control characters that are no white space, halves of characters, and what is no character
_INVISIBLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_LEAST = 1e-30  # KL: what is smaller is not drawn
_SUMMARY = 80  # characters of a folded prompt


def html(report: Report) -> str:
    """Render the page; names and texts in the report may be anybody's."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("calib.evaluate.page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = show_number
    return environment.get_template("report.html").render(
        report=report,
        table=_table(report),
        tiles=_tiles(report, report.judged) if report.judged else [],
        **_charts(report),
        texts=_texts(report),
        other_headings=OTHER_HEADINGS,
        other_tables=other_tables(report),
        tasks=task_table(report),
    )


def _visible(value: Any) -> Any:
    """Replace invisible characters in text that the page prints; markup of a macro is left."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return _INVISIBLE.sub("\ufffd", value) if is_text else value


def _charts(report: Report) -> dict[str, Any]:
    # matplotlib says on stderr that it looks for fonts, when it is imported too: nobody asked
    logger = logging.getLogger("matplotlib")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from calib.evaluate.page.figures import charts

        return charts(report)
    finally:
        logger.setLevel(before)


def _tiles(report: Report, row: Row) -> list[tuple[str, str, str]]:
    """Tiles of the subject: heading, figure, and a line below."""
    kl, _, ppl, top1, same, passkey = figures(row)
    reference = figures(report.variants[REFERENCE])
    size = report.bytes_per_token
    tiles = [
        ("KL, nats per token", *kl),
        ("perplexity", *ppl),
        ("same top-1 token", *top1),
        ("same greedy text", *same),
        ("passkeys found", passkey[0], f"{reference[5][0]} with its own cache"),
        ("cache per token", f"{size['fp8']:,} B", f"{size['16bit']:,} B in 16 bits"),
    ]
    return [tile for tile in tiles if tile[1]]


def _table(report: Report) -> dict[str, Any]:
    """Groups of rows, and the axis that their KL intervals are drawn on."""
    axis = _axis(report.variants.values(), report.noise_floor)
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for name, row in report.variants.items():
        # eight columns have to fit: the value says what unit its interval has
        cells = [(value, interval.replace("%", "")) for value, interval in figures(row)]
        places = {end: axis.place(x) for end, x in row.kl}
        is_subject = name == report.subject
        group = _group(name, row, report.bytes_per_token["16bit"])
        groups.setdefault(group, []).append(
            {"name": name, "row": row, "figures": cells, "kl": places, "is_subject": is_subject}
        )
    return {
        "groups": [(title, rows) for (_, title), rows in sorted(groups.items())],
        "ends": (f"{axis.low:g}", f"{axis.high:g}"),
        "floor": axis.place(report.noise_floor),
    }


def _group(name: str, row: Row, whole: int) -> tuple[int, str]:
    """Place and title of the rows of a table: by bytes, those with the most first."""
    if row.kind in ("control", REFERENCE):
        return 100, "reference and controls"
    if row.kind == "given":
        return 0, "given with --scales"
    if not (row.bytes_per_token and can_be_served(name, row)):
        return 99, "for comparison"
    # scales of tokens and blocks take up to two
    bits = 2 * int(8 * row.bytes_per_token / whole)
    return 16 - bits, f"about {bits} bits a value"


def _axis(rows: Iterable[Row], floor: float) -> Axis:
    """A percentage of the width for each magnitude, between round numbers."""
    # controls, and a floor far below, would leave no room to tell the others apart
    kl = [row.kl for row in rows if row.kind not in ("control", REFERENCE)]
    shown = [x for figure in kl for _, x in figure if _LEAST < x < math.inf]
    shown = shown or [floor if _LEAST < floor < math.inf else 1.0]
    low, high = min(shown), max(shown)
    # one decade more at each end: a logarithm may be rounded across its own
    decades = range(math.floor(math.log10(low)) - 1, math.floor(math.log10(high)) + 2)
    numbers = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return Axis(max(n for n in numbers if n <= low), min(n for n in numbers if n > high), 100.0)


def _texts(report: Report) -> list[dict[str, Any]]:
    """Greedy texts, one entry per prompt: the subject beside the reference, and all others."""
    written, name = report.texts.continuations, report.subject
    if name not in written:
        return []
    others = [each for each in written if each not in (REFERENCE, name)]
    return [
        {
            "prompt": prompt,
            "heading": _heading(written[name][i]),
            "start": " ".join(prompt.split())[:_SUMMARY],
            "reference": _reference(written[REFERENCE][i], written[name][i]),
            "subject": written[name][i],
            "others": [(other, written[other][i]) for other in others],
        }
        for i, prompt in enumerate(report.texts.prompts)
    ]


def _reference(reference: Continuation, other: Continuation) -> dict[str, str]:
    """Cut the reference's text where `other` leaves it."""
    whole = reference.start + reference.end
    return {"start": other.start, "end": whole.removeprefix(other.start)}


def _heading(text: Continuation) -> str:
    if not text.end:
        return f"all {text.same_tokens} tokens are the same"
    if text.same_tokens == 0:
        return "the first token differs"
    return f"token {text.same_tokens + 1} is the first that differs"


def check_report_directory(directory: Path) -> None:
    """Refuse a file, a directory that holds something else than a report, and no matplotlib."""
    check_can_draw("a report")
    if directory.exists() and not directory.is_dir():
        raise InputError(f"'{directory}' is a file; give another --output")
    others = [p for p in directory.glob("*") if p.name.removeprefix(".") not in _FORMS]
    if others:
        raise InputError(f"'{directory}' holds '{others[0].name}', which is no report; give another --output")


def write_report(report: Report, directory: Path) -> None:
    """Write all files of a report, or none; an earlier report there is replaced."""
    check_report_directory(directory)
    files = {directory / name: form(report) for name, form in _FORMS.items()}
    scratch = {file: file.with_name(f".{file.name}") for file in files}
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            scratch[file].write_text(text, encoding="utf-8", errors="replace")
        for file, text in files.items():
            scratch[file].replace(file)
            if not text:
                file.unlink()  # of an earlier report
    except OSError as error:
        raise InputError(
            f"cannot write '{directory}': {error.strerror or error}; no file of a report was "
            "replaced; choose another output"
        ) from None
    finally:
        with suppress(OSError):
            for each in scratch.values():
                each.unlink(missing_ok=True)
            if is_new:
                directory.rmdir()  # where nothing was written
    WRITTEN.append(directory)


_FORMS: dict[str, Callable[[Report], str]] = {
    REPORT_FILE: lambda report: json_text(report.to_json(), indent=2) + "\n",
    "report.md": markdown,
    "report.html": html,
}
