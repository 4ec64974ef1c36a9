"""The report as a table, for the terminal and for `report.md`."""

from typing import Any

from calib.eval.measure import REFERENCE

HEADINGS = ("cache", "KL", "KL p99", "perplexity", "top-1", "same text", "passkeys")
NO_DIFFERENCE = "no measurable difference"


def table_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row per variant, intervals in brackets."""
    return [_row(name, row) for name, row in report["variants"].items() if name != REFERENCE]


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    kl = _interval(row["kl"], "{:.2g}") if row["measurable"] else NO_DIFFERENCE
    return (
        name,
        kl,
        f"{row['kl_p99']['value']:.2g}",
        _interval(row["ppl_change"], "{:+.2%}"),
        f"{row['top1']['value']:.1%}",
        f"{row['same_tokens']['value']:.0f} tokens" if "same_tokens" in row else "",
        f"{row['passkey']['value']:.0%}" if "passkey" in row else "",
    )


def closing_lines(report: dict[str, Any]) -> list[str]:
    """Advice, and what the figures are of."""
    data, size = report["data"], report["bytes_per_token"]
    return [
        *(f"advice: {line}" for line in report["advice"]),
        *(f"warning: {line}" for line in report["warnings"]),
        f"{data['tokens']:,} held-out tokens of {data['source']} in {data['documents']} documents; "
        f"scales from {data['calibration_tokens']:,} others; {report['backend']} backend, "
        f"{report['dtype']}; noise floor KL {report['noise_floor']:.2g}",
        f"KV cache: {size['fp8']:,} bytes a token in FP8, {size['16bit']:,} in 16 bits",
    ]


def markdown(report: dict[str, Any]) -> str:
    """`report.md`."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *map(_escaped, table_rows(report))]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    legend = "\n".join(
        f"- `{_escape(name)}`: {_escape(row['what'])}" for name, row in report["variants"].items()
    )
    lines = "\n".join(f"- {_escape(line)}" for line in closing_lines(report))
    return (
        f"# FP8 KV cache of {_escape(report['model'])}\n\n{lines}\n\n{table}\n\n"
        "KL(reference || variant) in nats per token, mean with its 95 % bootstrap interval over "
        "documents, and 99th percentile; change of perplexity; share of positions with the same "
        "likeliest token; greedy tokens before the first that differs; passkeys found.\n\n"
        f"{legend}\n"
    )


def _interval(figure: dict[str, float], form: str) -> str:
    value, low, high = (form.format(figure[key]) for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _escaped(row: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_escape, row))


def _escape(text: str) -> str:
    # names come from directories that others made
    for character in "\\`*_|<>[]":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())
