"""Two evaluation reports side by side."""

from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from calib.choices import REFERENCE
from calib.errors import InputError, first_problem
from calib.evaluate.report import REPORT_FILE, SCHEMA, Data, Report, Row, Suite
from calib.files.strict_json import read_bytes, read_object

_HOW_MADE = f"give what `fp8kv-eval -o DIR` writes: the directory, or its {REPORT_FILE}"
_FIGURES = {"kl", "ppl_change", "top1", "measurable", "same_tokens", "passkey"}


class Pair(NamedTuple):
    """Figures of one variant in two reports."""

    name: str
    a: Row
    b: Row

    @property
    def kl_ratio(self) -> float | None:
        """KL of B over that of A; None where A has none."""
        is_ratio = self.is_finite and self.a.kl.value > 0
        return self.b.kl.value / self.a.kl.value if is_ratio else None

    @property
    def is_finite(self) -> bool:
        """Return whether both have a KL."""
        return self.a.kl.is_finite and self.b.kl.is_finite

    @property
    def is_same(self) -> bool:
        """Return whether the KL intervals overlap, or neither is above its noise floor."""
        overlap = self.a.kl.low <= self.b.kl.high and self.b.kl.low <= self.a.kl.high
        is_noise = not (self.a.measurable or self.b.measurable)
        return self.is_finite and (overlap or is_noise)


class Comparison(NamedTuple):
    """The variants that two reports have, and what makes their figures doubtful."""

    a: Path
    b: Path
    pairs: list[Pair]
    only_a: list[str]
    only_b: list[str]
    obstacles: list[str]  # why no figure of A can be compared with one of B
    doubts: list[str]  # what else differs

    @property
    def is_comparable(self) -> bool:
        """Return whether both measured the same model in the same way on the same text."""
        return not self.obstacles

    @property
    def warnings(self) -> list[str]:
        """Say what differs, and what follows from it."""
        return [f"A and B are not comparable: {why}" for why in self.obstacles] + self.doubts

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "variants": {
                pair.name: {
                    "a": pair.a.model_dump(include=_FIGURES),
                    "b": pair.b.model_dump(include=_FIGURES),
                    "kl_ratio": pair.kl_ratio if self.is_comparable else None,
                    "no_measurable_difference": pair.is_same if self.is_comparable else None,
                }
                for pair in self.pairs
            },
            "comparable": self.is_comparable,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "warnings": self.warnings,
        }


def compare_reports(a: Path, b: Path) -> Comparison:
    """Compare two reports, each given as a file or as the directory that holds it."""
    first, second = load_report(a), load_report(b)
    rows_a, rows_b = ({n: x.variants[n] for n in x.variants if n != REFERENCE} for x in (first, second))
    return Comparison(
        a,
        b,
        pairs=[Pair(name, row, rows_b[name]) for name, row in rows_a.items() if name in rows_b],
        only_a=[name for name in rows_a if name not in rows_b],
        only_b=[name for name in rows_b if name not in rows_a],
        obstacles=[*_obstacles(first, second)],
        doubts=[*_doubts(first, second)],
    )


def load_report(path: Path) -> Report:
    """Read a report; refuse one that is damaged or of another schema."""
    file = path / REPORT_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise InputError(
            f"'{path}' holds no {REPORT_FILE}; {_HOW_MADE}; to compare scales, give two directories"
        )
    document = read_object(file)
    if "schema" not in document:
        raise InputError(f"'{file}' is not a report of fp8kv-eval: it has no `schema`; {_HOW_MADE}")
    if document["schema"] != SCHEMA:
        raise InputError(
            f"'{file}' is of schema {document['schema']!r:.20}; this version reads {SCHEMA}: "
            "evaluate again with it"
        )
    try:
        return Report.model_validate_json(read_bytes(file), strict=True)
    except ValidationError as error:
        raise InputError(f"'{file}' is damaged: {first_problem(error)}; evaluate again") from None


def _obstacles(a: Report, b: Report) -> Iterator[str]:
    """Say why no figure of one report can be compared with one of the other."""
    if a.model != b.model and _perplexity(a) != _perplexity(b):
        yield f"A measured the model {a.model}, B {b.model}"
    texts, prints = [_describe_text(x.data) for x in (a, b)], [x.data.fingerprint for x in (a, b)]
    if prints[0] != prints[1] and texts[0] == texts[1]:
        yield f"both read {texts[0]}, but not the same ones"
    elif prints[0] != prints[1] or (a.data.documents, a.data.tokens) != (b.data.documents, b.data.tokens):
        yield f"A read {texts[0]}, B {texts[1]}"
    if a.attention != b.attention:
        yield f"A was measured with --attention {a.attention}, B with --attention {b.attention}"


def _perplexity(report: Report) -> float:
    """Return the perplexity without FP8, by which a model with two names is recognised."""
    return report.variants[REFERENCE].ppl if REFERENCE in report.variants else nan


def _describe_text(data: Data) -> str:
    plural = "" if data.documents == 1 else "s"
    return f"{data.tokens:,} tokens in {data.documents} sample{plural} of {data.source}"


def _doubts(a: Report, b: Report) -> Iterator[str]:
    """Say what differs that concerns some of the figures, or may explain a small difference."""
    if a.model != b.model and _perplexity(a) == _perplexity(b):
        yield f"A names the model {a.model}, B {b.model}; both have the same perplexity, so it is one model"
    tokens_a, tokens_b = a.data.calibration_tokens, b.data.calibration_tokens
    if tokens_a != tokens_b:
        yield f"A derived its scales from {tokens_a:,} tokens, B from {tokens_b:,}: they may differ by that"
    for words, of_a, of_b in (("in", a.dtype, b.dtype), ("with the backend", a.backend, b.backend)):
        if of_a != of_b:
            yield f"A was computed {words} {of_a}, B {words} {of_b}: small differences may come from that"
    writing, passkeys = ([describe(x.suite) for x in (a, b)] for describe in (_show_writing, _show_passkeys))
    if a.suite.prompts and b.suite.prompts and writing[0] != writing[1]:
        yield f"A continued {writing[0]}, B {writing[1]}: 'same text' is not comparable"
    if a.suite.passkey_tokens and b.suite.passkey_tokens and passkeys[0] != passkeys[1]:
        yield f"A hid passkeys in {passkeys[0]}, B in {passkeys[1]}: 'passkeys' is not comparable"


def _show_writing(suite: Suite) -> str:
    return f"{suite.prompts} prompts by {suite.new_tokens} tokens"


def _show_passkeys(suite: Suite) -> str:
    depths = ", ".join(f"{depth:.0%}" for depth in suite.passkey_depths)
    return f"texts of {' and '.join(map(str, suite.passkey_tokens))} tokens at {depths} of them"
