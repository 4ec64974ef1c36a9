"""Where a report goes: a directory, whole or absent."""

import json
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.eval.markdown import markdown

REPORT_FILE = "report.json"


def write_report(report: dict[str, Any], directory: Path) -> None:
    """Write `report.json` and `report.md`; an earlier report there is replaced.

    Raises:
        InputError: the directory cannot be written, or holds something else.
    """
    others = [p for p in directory.glob("*") if p.name not in (REPORT_FILE, "report.md")]
    if others:
        raise InputError(
            f"'{directory}' holds '{others[0].name}', which is no report; give another --output"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("report.md", markdown(report)),
            (REPORT_FILE, json.dumps(report, indent=2) + "\n"),
        ):
            scratch = directory / f".{name}"
            scratch.write_text(text)
            scratch.replace(directory / name)
    except OSError as error:
        raise InputError(f"cannot write '{directory}': {error.strerror or error}") from None
