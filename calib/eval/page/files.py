"""Write a report into a directory, whole or not at all."""

import json
from collections.abc import Callable
from pathlib import Path

from calib.errors import InputError
from calib.eval.page.html import html
from calib.eval.page.markdown import markdown
from calib.eval.schema import REPORT_FILE, Report
from calib.progress import WRITTEN


def check_report_directory(directory: Path) -> None:
    """Check that a report can go to `directory`.

    Raises:
        InputError: it is a file, or holds something else.
    """
    if directory.exists() and not directory.is_dir():
        raise InputError(f"'{directory}' is a file; give another --output")
    others = [p for p in directory.glob("*") if p.name.removeprefix(".") not in _FORMS]
    if others:
        raise InputError(
            f"'{directory}' holds '{others[0].name}', which is no report; give another --output"
        )


def write_report(report: Report, directory: Path) -> None:
    """Write `report.json`, `report.md` and `report.html`; an earlier report there is replaced.

    Raises:
        InputError: the directory cannot be written, or holds something else.
    """
    check_report_directory(directory)
    files = {name: form(report) for name, form in _FORMS.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            scratch = directory / f".{name}"
            scratch.write_text(text, encoding="utf-8", errors="replace")
            scratch.replace(directory / name)
    except OSError as error:
        raise InputError(f"cannot write '{directory}': {error.strerror or error}") from None
    WRITTEN.append(directory)


def _json(report: Report) -> str:
    return json.dumps(report.to_json(), indent=2) + "\n"


_FORMS: dict[str, Callable[[Report], str]] = {
    REPORT_FILE: _json,
    "report.md": markdown,
    "report.html": html,
}
