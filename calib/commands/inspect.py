"""`fp8kv inspect` and `fp8kv compare`: scales of a directory, of two; two evaluations."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import typer

from calib.commands import flags
from calib.commands.running import Answer, Block, TextTable, job_command
from calib.errors import InputError, NoModelError, NoScalesError
from calib.files.names import STATS_FILE
from calib.files.text import show_layers, show_number

if TYPE_CHECKING:
    from calib.evaluate.compare import Comparison, Pair
    from calib.evaluate.report import Figure
    from calib.files.stored_scales import StoredLayer, StoredScales, Values
    from calib.scales.places import LayerPlaces
    from calib.scales.stats import KVStats

_HEADINGS = ("layer", "K scale", "V scale", "Q scale", "type", "shape")
_REPORT_HEADINGS = (
    *("cache", "KL A", "KL B", "B / A"),
    *("perplexity A, B", "top-1 A, B", "same text A, B", "passkeys A, B"),
)
_PAIR_HEADINGS = ("layer", "K, A", "K, B", "B / A", "V, A", "V, B", "B / A")


@job_command
def inspect(
    directory: Path = typer.Argument(
        ..., help="A checkpoint, scales that any tool wrote, or statistics.", metavar="DIRECTORY"
    ),
    plot: Path | None = flags.option("Draw the scales into this .png, .svg or .pdf file.", metavar="FILE"),
) -> Answer:
    """Show the FP8 KV-cache scales of a directory, whatever tool wrote them. Weights are not read."""
    from calib.files.cache_type import nvfp4_convention
    from calib.files.fingerprint import baked_for

    scales, places, lines = _read(directory)
    baked = baked_for(scales.directory)
    if plot:
        if not (scales.layers or places):
            raise InputError(f"'{directory}' is baked for {baked}, with no scales to draw; leave --plot out")
        from calib.scales.plot import plot_scales

        plot_scales(scales, plot, places)
    nvfp4, limit = nvfp4_convention(scales.directory), _fp8_limit(scales)
    first = [{"layer": x.layer, "k": x.k.first_tokens(limit), "v": x.v.first_tokens(limit)} for x in places]
    document = scales.to_json() | {"nvfp4": nvfp4 and nvfp4._asdict(), "first_tokens": first, "baked": baked}
    head = [f"baked for {baked}: its weights hold the factors, so it needs no scales"] if baked else []
    return Answer(document, chain(head, _scales_blocks(scales, places), lines))


def _read(directory: Path) -> tuple["StoredScales", list["LayerPlaces"], list[str]]:
    """Read the scales, and where statistics say the largest values were; return lines on these, too.

    There may be statistics alone: of format fp8kv, or of a running engine, which have no places: there the
    scales are those that hold the largest values. A baked model may have neither.
    """
    from calib.files.fingerprint import baked_for
    from calib.files.model_directory import open_model_directory
    from calib.files.stored_scales import StoredScales, read_scales
    from calib.scales.places import read_places

    try:
        scales = read_scales(directory, strict=False)
    except (NoModelError, NoScalesError):
        opened = open_model_directory(directory, weights=False, or_statistics=True)
        if not (directory / STATS_FILE).is_file():
            if baked_for(opened):
                return StoredScales(opened, []), [], []
            raise
        from calib.scales.stats_file import load_stats, smallest_scales  # with torch

        if places := read_places(directory):
            return StoredScales(opened, []), places, []
        stats = load_stats(directory)
        return StoredScales(opened, smallest_scales(stats)), [], _traffic_notes(directory, stats)
    try:
        places, path = read_places(directory), quote(str(directory))
    except InputError as error:
        return scales, [], [f"problem: {error}"]
    note = f"note: fp8kv verify {path} compares the scales with the statistics beside them"
    return scales, places, [note] if (directory / STATS_FILE).is_file() else []


def _traffic_notes(directory: Path, stats: "KVStats") -> list[str]:
    """Say which scales are estimates, and what compares others with this traffic."""
    from calib.engines.scale_fit import describe_unbounded

    notes = []
    for letter in "kv":
        layers = [x for x in stats.layers.values() if letter in x.estimated and letter not in x.unbounded]
        if layers:
            where = show_layers([layer.layer_idx for layer in layers])
            notes.append(f"note: {letter.upper()} of {where} is estimated, as its cache clipped it")
    unbounded = [(x.layer_idx, letter) for x in stats.layers.values() for letter in x.unbounded]
    return [
        *notes,
        *([f"problem: {describe_unbounded(unbounded)}"] if unbounded else []),
        f"note: fp8kv verify DIR --against {quote(str(directory))} compares the scales in DIR with it",
    ]


def _fp8_limit(scales: "StoredScales") -> float:
    """Return where the FP8 type of the scales ends; E4M3, where files name NVFP4 or several types."""
    from calib.files.cache_type import FP8_MAX

    with suppress(InputError):
        return FP8_MAX[scales.fp8_dtype]
    return FP8_MAX["e4m3fn"]


def _scales_blocks(scales: "StoredScales", places: list["LayerPlaces"]) -> Iterator[Block]:
    yield from _opening_lines(scales) if scales.layers or places else ()
    if scales.layers:
        rows = [_layer_row(x, scales) for x in (*scales.layers, *scales.drafts)]
        yield TextTable(str(scales.directory.path), _HEADINGS, rows)
        if lacking := scales.layers_without_scales:
            yield f"note: {show_layers(lacking)} {'have' if len(lacking) > 1 else 'has'} no scales"
    if places:
        limit, rows = _fp8_limit(scales), []
        title = f"amax by position in the sample; without position 0, divided by {limit:g} (no headroom)"
        columns = ("at 1, 2", "after", f"/ {limit:g} without 0")
        for layer in places:
            amax = [*layer.k.first_tokens(limit).values(), *layer.v.first_tokens(limit).values()]
            rows.append((str(layer.layer), *("-" if value is None else f"{value:.4g}" for value in amax)))
        yield TextTable(title, ("layer", "K at 0", *columns, "V at 0", *columns), rows)
    yield from (f"problem: {text}" for text in scales.problems)


def _opening_lines(scales: "StoredScales") -> list[str]:
    from calib.files.cache_type import nvfp4_convention
    from calib.files.stored_scales import quantization

    if not scales.layers:
        return ["statistics, and no scales in the form of an engine"]
    if not scales.formats:
        return ["statistics of an engine's traffic: these are the smallest scales that hold it in E4M3"]
    directory, files = scales.directory, len(scales.directory.shards)
    index = "no index" if directory.index is None else "an index"
    nvfp4, count = nvfp4_convention(directory), len(scales.layers)
    return [
        f"{count} layer{'' if count == 1 else 's'}, {scales.strategy}; names of {', '.join(scales.formats)}",
        f"{files} safetensors file{'' if files == 1 else 's'}, {index}; {quantization(directory)}",
        *([f"values of an NVFP4 cache: {nvfp4}"] if nvfp4 else []),
    ]


def _layer_row(layer: "StoredLayer", scales: "StoredScales") -> tuple[str, ...]:
    return (
        str(layer.name),
        *map(_show_scale, (layer.k, layer.v, layer.q)),
        ", ".join(sorted({tensor.dtype for tensor in layer.tensors}))
        or ("JSON" if scales.directory.json else "-"),
        ", ".join(sorted({str([*tensor.shape]) for tensor in layer.tensors})) or "-",
    )


def _show_scale(values: "Values | None") -> str:
    """Format the scale of a layer, or the least and the largest of several."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{min(values):.4g} to {max(values):.4g} ({len(values)})"


_HELP = "The {} side: a report.json, its directory, or a directory with scales."


@job_command
def compare(
    a: Path = typer.Argument(..., help=_HELP.format("first"), metavar="A"),
    b: Path = typer.Argument(..., help=_HELP.format("second"), metavar="B"),
) -> Answer:
    """Show two reports of `fp8kv eval`, or the scales of two directories, side by side."""
    if any(path.is_file() or (path / "report.json").exists() for path in (a, b)):
        from calib.evaluate.compare import compare_reports

        reports = compare_reports(a, b)
        return Answer(reports.to_json(), _report_blocks(reports))
    from calib.same_model.scale_ratios import compare_scales

    scales = compare_scales(a, b)
    rows = [(str(x.name), *_scale_cells(x.k, y.k), *_scale_cells(x.v, y.v)) for x, y in scales.pairs]
    table = TextTable(f"A: {a}, B: {b}", _PAIR_HEADINGS, rows)
    return Answer(scales.to_json(), [table, *(f"note: {note}" for note in scales.notes), scales.summary])


def _scale_cells(a: "Values | None", b: "Values | None") -> tuple[str, str, str]:
    from calib.same_model.scale_ratios import ratio

    shown, form = "-", "{:.4g}"
    if ends := ratio(a, b):
        # NaN is in both ends, where one head has it
        shown = " to ".join(dict.fromkeys(show_number(end, form) for end in ends))
    return _show_scale(a), _show_scale(b), shown


def _report_blocks(comparison: "Comparison") -> Iterator[Block]:
    yield TextTable(
        "Two evaluations",
        _REPORT_HEADINGS,
        [_row(pair, is_comparable=comparison.is_comparable) for pair in comparison.pairs],
    )
    yield from (f"A: {comparison.a}", f"B: {comparison.b}")
    for letter, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            yield f"only in {letter}: {', '.join(names)}"
    yield from (f"warning: {warning}" for warning in comparison.warnings)


def _row(pair: "Pair", *, is_comparable: bool) -> tuple[str, ...]:
    from calib.evaluate.page.tables import figure_cell

    a, b = pair.a, pair.b
    ratio = "-" if pair.kl_ratio is None else f"{pair.kl_ratio:.3g}x"
    verdict = "no measurable difference" if pair.is_same else ratio
    return (
        pair.name,
        *(str(figure_cell(x.kl)) for x in (a, b)),
        verdict if is_comparable else "not comparable",
        _both(a.ppl_change, b.ppl_change, "{:+.2%}"),
        _both(a.top1, b.top1, "{:.1%}"),
        _both(a.same_tokens, b.same_tokens, "{:.0f}", " tokens"),
        _both(a.passkey, b.passkey, "{:.0%}"),
    )


def _both(a: "Figure | None", b: "Figure | None", form: str, unit: str = "") -> str:
    from calib.evaluate.page.tables import figure_cell

    values = [figure_cell(figure, form, unit).value for figure in (a, b)]
    return ", ".join(value or "-" for value in values) if any(values) else ""
