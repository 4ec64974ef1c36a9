"""`report.html`: one file with everything in it, that loads nothing and runs nothing."""

import re
from typing import Any

from calib.eval.html_figures import (
    head_chart,
    histogram_charts,
    layer_chart,
    position_chart,
    search_chart,
)
from calib.eval.html_table import table
from calib.eval.html_texts import texts
from calib.eval.markdown import figures
from calib.eval.task_table import task_headings, task_rows, task_title
from calib.eval.variants import REFERENCE

# control characters that are no white space, halves of characters, and what is no character
_INVISIBLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def html(report: dict[str, Any]) -> str:
    """The page of a report; names and texts in it may be anybody's."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("calib.eval"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(_page(_visible(report)))


def _page(report: dict[str, Any]) -> dict[str, Any]:
    shown, folded = histogram_charts(report)
    subject = report["variants"].get(report["subject"])
    return {
        "report": report,
        "table": table(report),
        "tiles": _tiles(report, subject) if subject else [],
        "position": position_chart(report),
        "layers": layer_chart(report),
        "search": search_chart(report),
        "heads": head_chart(report),
        "histograms": shown,
        "folded": folded,
        "texts": texts(report),
        "tasks": _tasks(report) if "tasks" in report else None,
    }


def _tasks(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "title": task_title(report),
        "headings": task_headings(report),
        "rows": task_rows(report),
    }


def _tiles(report: dict[str, Any], row: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Heading, figure and what is below it, of the subject."""
    kl, _, ppl, top1, same, passkey = figures(row)
    reference = figures(report["variants"][REFERENCE])
    size = report["bytes_per_token"]
    tiles = [
        ("KL, nats per token", *kl),
        ("perplexity", *ppl),
        ("same top-1 token", *top1),
        ("same greedy text", *same),
        ("passkeys found", passkey[0], f"{reference[5][0]} with its own cache"),
        (
            "cache per token",
            f"{size['fp8']:,} B",
            f"{size['16bit']:,} B in 16 bits",
        ),
    ]
    return [tile for tile in tiles if tile[1]]


def _visible(value: Any) -> Any:
    """`value` with what cannot be shown replaced, in keys as well."""
    if isinstance(value, str):
        return _INVISIBLE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_visible(key): _visible(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_visible(each) for each in value]
    return value
