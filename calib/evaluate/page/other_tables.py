"""The tables of other text, for the terminal, for `report.md` and for the page."""

from collections.abc import Iterable
from typing import NamedTuple

from calib.evaluate.report import Events, Exceedance, Figure, Report
from calib.files.text import show_interval, show_number

OTHER_HEADINGS = (
    "text",
    "documents",
    "tokens",
    "KL",
    "beside its own",
    "tokens clipped",
    "most in",
)
Cell = tuple[str, str]  # what it says, and a line below


class OtherTable(NamedTuple):
    """One cache on its own text, in the first row, and on others."""

    name: str
    cells: list[tuple[Cell, ...]]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells, each on one line."""
        return [tuple(" ".join(cell).strip() for cell in row) for row in self.cells]


def other_tables(report: Report) -> list[OtherTable]:
    """A table for each cache that was measured on other text, the verdict's first."""
    names = dict.fromkeys(name for text in report.other_texts for name in text.variants)
    ordered = sorted(names, key=lambda name: name != report.subject)
    return [OtherTable(name, [_own(report, name), *_others(report, name)]) for name in ordered]


def printed_tables(report: Report) -> list[OtherTable]:
    """What the terminal has room for: the scales given, or else the verdict's; layers, no heads."""
    tables = [table for table in other_tables(report) if table.name in report.subjects]
    return [OtherTable(name, [(*row[:-1], (row[-1][0], "")) for row in cells]) for name, cells in tables]


def _own(report: Report, name: str) -> tuple[Cell, ...]:
    row, data = report.variants[name], report.data
    layers = [(each.layer_idx, each.exceedance) for each in row.layers if each.exceedance]
    counted = row.clipped.tokens if row.clipped else data.tokens
    fewer = f"(clipped: of {counted:,})" * (counted != data.tokens)
    counts = ((data.source, "(its own)"), (str(data.documents), ""), (f"{data.tokens:,}", fewer))
    return (*counts, _kl(row.kl), ("", ""), _share(row.clipped), _worst(layers))


def _others(report: Report, name: str) -> Iterable[tuple[Cell, ...]]:
    for text in report.other_texts:
        row = text.variants[name]
        layers = [(each.layer_idx, each.exceedance) for each in row.layers]
        counts = ((text.dataset, ""), (str(text.documents), ""), (f"{text.tokens:,}", ""))
        yield (*counts, _kl(row.kl), (row.differs, ""), _share(row.clipped), _worst(layers))


def _kl(kl: Figure) -> Cell:
    return show_number(kl.value), show_interval(kl.low, kl.high)


def _share(clipped: Events | None) -> Cell:
    if clipped is None:
        return "", ""
    return f"{clipped.share:.2%}", f"[{clipped.low:.2%}, {clipped.high:.2%}]"


def _worst(layers: Iterable[tuple[int, Exceedance]]) -> Cell:
    """The layer with most tokens clipped, and its head with most; empty where there are none."""
    idx, layer = max(layers, key=lambda each: each[1].events, default=(0, None))
    if layer is None or not layer.events:
        return "", ""
    heads = [
        (count, f"{letter.upper()} head {head}")
        for letter, counts in layer.by_head.items()
        for head, count in enumerate(counts)
    ]
    count, head = max(heads, key=lambda each: each[0])
    return f"layer {idx}: {layer.share:.2%}", f"({head}: {count / layer.tokens:.2%})"
