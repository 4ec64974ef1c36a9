"""Two evaluation reports side by side."""

from collections.abc import Iterator
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from calib.choices import REFERENCE
from calib.errors import InputError, first_problem
from calib.evaluate.report import REPORT_FILE, SCHEMA, Report, Row
from calib.files.strict_json import read_bytes, read_object

_HOW_MADE = f"give what `fp8kv-eval -o DIR` writes: the directory, or its {REPORT_FILE}"
_NOT_COMPARABLE = "the figures are not comparable"
_NOISE = "small differences may come from that"
_OTHER_SUITE = "so does what was measured"
_FIGURES = {"kl", "ppl_change", "top1", "measurable", "same_tokens", "passkey"}
# what, where it is in a report, and what follows if it differs
_CONDITIONS = (
    ("the model", "model", _NOT_COMPARABLE),
    ("the data", "data.source", _NOT_COMPARABLE),
    ("the text's fingerprint", "data.fingerprint", _NOT_COMPARABLE),
    ("the number of held-out documents", "data.documents", _NOT_COMPARABLE),
    ("the number of held-out tokens", "data.tokens", _NOT_COMPARABLE),
    ("the number of calibration tokens", "data.calibration_tokens",
     "so do the scales that were derived from them"),
    ("the dtype", "dtype", _NOISE),
    ("the backend", "backend", _NOISE),
    ("the engine's attention", "attention", _NOT_COMPARABLE),
)  # fmt: skip


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
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "variants": {
                pair.name: {
                    "a": pair.a.model_dump(include=_FIGURES),
                    "b": pair.b.model_dump(include=_FIGURES),
                    "kl_ratio": pair.kl_ratio,
                    "no_measurable_difference": pair.is_same,
                }
                for pair in self.pairs
            },
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
        warnings=[*_differences(first, second)],
    )


def load_report(path: Path) -> Report:
    """Read a report; refuse one that is damaged or of another schema."""
    file = path / REPORT_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise InputError(f"'{path}' holds no {REPORT_FILE}; {_HOW_MADE}")
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


def _differences(a: Report, b: Report) -> Iterator[str]:
    """Yield one line for each condition that differs."""
    conditions = [(what, attrgetter(at)(a), attrgetter(at)(b), so) for what, at, so in _CONDITIONS]
    for key, size in asdict(a.suite).items():
        conditions.append((f"the suite's {key}", size, getattr(b.suite, key), _OTHER_SUITE))
    for what, one, other, consequence in conditions:
        if one != other:
            yield f"{what} differs: {one} in A, {other} in B; {consequence}"
