"""A comparison as a table and lines for the terminal."""

from calib.eval.compare import Comparison, Figure, Pair
from calib.eval.markdown import NO_DIFFERENCE

HEADINGS = (
    *("cache", "KL A", "KL B", "B / A"),
    *("perplexity A, B", "top-1 A, B", "same text A, B", "passkeys A, B"),
)


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """One row per variant that both reports have."""
    return [_row(pair) for pair in comparison.pairs]


def closing_lines(comparison: Comparison) -> list[str]:
    """What is compared, what is not, and what makes it doubtful."""
    lines = [f"A: {comparison.a}", f"B: {comparison.b}"]
    for letter, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            lines.append(f"only in {letter}: {', '.join(names)}")
    return lines + [f"warning: {line}" for line in comparison.warnings]


def _row(pair: Pair) -> tuple[str, ...]:
    a, b = pair.a, pair.b
    return (
        pair.name,
        _with_interval(a.kl),
        _with_interval(b.kl),
        _ratio(pair),
        _both(a.ppl_change, b.ppl_change, "{:+.2%}"),
        _both(a.top1, b.top1, "{:.1%}"),
        _both(a.same_tokens, b.same_tokens, "{:.0f} tokens"),
        _both(a.passkey, b.passkey, "{:.0%}"),
    )


def _ratio(pair: Pair) -> str:
    if pair.is_same:
        return NO_DIFFERENCE
    return "-" if pair.kl_ratio is None else f"{pair.kl_ratio:.3g}x"


def _with_interval(figure: Figure) -> str:
    return f"{figure.value:.2g} [{figure.low:.2g}, {figure.high:.2g}]"


def _both(a: Figure | None, b: Figure | None, form: str) -> str:
    if a is None and b is None:
        return ""
    # adding 0.0 to what rounds to nothing takes its sign
    return ", ".join(
        "-" if each is None else form.format(round(each.value, 4) + 0.0) for each in (a, b)
    )
