"""Documents that nothing in an evaluation was calibrated on, as their contents tell."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from calib.data import CalibrationData, Piece
from calib.errors import InputError
from calib.files.fingerprint import baked_for
from calib.files.model_directory import open_model_directory
from calib.files.names import BAKE_FILE
from calib.scales.stats_file import load_records
from calib.scales.text_summary import Records, TextRecord, read_records

Readers = Mapping[str, Records]  # the text that each has read, by its name in messages
OWN = "this evaluation"
_MORE_LOADS = 3  # each loads more than twice as many samples as the load before


class HeldOut(NamedTuple):
    """Loaded samples, and documents among them that nobody has read."""

    data: CalibrationData
    pieces: list[Piece]
    warnings: list[str]


def find_readers(scales: Sequence[Path], model: Path) -> tuple[Readers, list[str]]:
    """Read the records of the text behind each of `scales`, and behind a baked `model`.

    Return them with warnings that name those without a whole record.
    """
    readers = {f"'{path}'": load_records(path) for path in scales}
    if baked_for(open_model_directory(model, weights=False)):
        readers[f"'{model}'"] = read_records(model / BAKE_FILE)
    unknown = [name for name, records in readers.items() if None in records]
    return readers, [
        f"{name} has {'a record of only a part' if any(readers[name]) else 'no record'} of the text behind "
        "its scales, so some of the held-out text may not be new to it; calibrate again to record all of it"
        for name in unknown
    ]


def add_own_samples(readers: Readers, samples: Sequence[Sequence[int]]) -> Readers:
    """Add the evaluation itself, which calibrates on `samples`."""
    return {**readers, OWN: (TextRecord.of(samples),)} if samples else readers


def hold_out(
    load: Callable[[int], CalibrationData],
    readers: Readers,
    own: int,
    documents: int,
    least: int | None = None,
) -> HeldOut:
    """Take `documents` samples that no reader knows, from behind the `own` that are calibrated on.

    `load(count)` returns `count` samples, or all if the data has fewer. Raises an InputError if fewer than
    `least` samples, by default `documents`, are left.
    """
    count = own + documents
    data = load(count)
    warnings, search = data.warnings, _search(data.pieces, own, documents, readers)
    for _ in range(_MORE_LOADS):
        if len(search.documents) == documents or len(data.samples) < count:
            break
        # as many as all readers can know
        records = [record for each in readers.values() for record in each if record]
        seq_len = max(map(len, data.samples))
        count = 2 * count + sum(record.samples + record.tokens // seq_len for record in records)
        data = replace(load(count), warnings=warnings)
        search = _search(data.pieces, own, documents, readers)
    needed = documents if least is None else least
    if len(search.documents) < needed:
        raise InputError(search.refusal(data, own, needed))
    return HeldOut(data, search.documents, search.warnings(data.source))


class _Search(NamedTuple):
    """Documents that nobody has read, and how many were left out before there were enough."""

    documents: list[Piece]
    left_out: Counter[str]  # by the reader
    short: int  # of which a reader cannot tell

    @property
    def examined(self) -> int:
        return len(self.documents) + self.left_out.total() + self.short

    def warnings(self, source: str) -> list[str]:
        lines = [
            f"{count} of {self.examined} samples of '{source}' {_verb(count)} left out: {name} was "
            "calibrated on that text, or on much of it"
            for name, count in self.left_out.items()
        ]
        if self.short:
            lines.append(
                f"{self.short} of {self.examined} samples of '{source}' {_verb(self.short)} left out: too "
                "short to tell whether scales were calibrated on that text"
            )
        return lines

    def refusal(self, data: CalibrationData, own: int, needed: int) -> str:
        if not self.left_out and not self.short:
            first = f", {own} of them to calibrate on" if own else ""
            count = len(data.samples)
            return (
                f"'{data.source}' has {count} sample{'' if count == 1 else 's'}, and {own + needed} are "
                f"needed{first}: use a larger dataset, or a smaller --samples or --seq-len"
            )
        readers = self.left_out.items()
        reasons = [f"{name} read {count} other{'' if count == 1 else 's'}" for name, count in readers]
        if self.short:
            reasons.append(f"{self.short} {_verb(self.short)} too short to tell")
        new = len(self.documents)
        return (
            f"{new} of {self.examined} samples of '{data.source}' {_verb(new)} new, and {needed} are needed: "
            f"{', '.join(reasons)}; use another dataset"
        )


def _verb(count: int) -> str:
    return "is" if count == 1 else "are"


def _search(pieces: Sequence[Piece], own: int, documents: int, readers: Readers) -> _Search:
    """Look for `documents` that are new to `readers` and to the first `own` samples."""
    readers = add_own_samples(readers, [piece.ids for piece in pieces[:own]])
    new: list[Piece] = []
    left_out: Counter[str] = Counter()
    short = 0
    for piece in pieces[own:]:
        if len(new) == documents:
            break
        answers = {name: _has_read(records, piece.ids) for name, records in readers.items()}
        if reader := next((name for name, answer in answers.items() if answer), None):
            left_out[reader] += 1
        elif None in answers.values():
            short += 1
        else:
            new.append(piece)
    return _Search(new, left_out, short)


def _has_read(records: Records, sample: Sequence[int]) -> bool | None:
    """Return whether the sample is in one of `records`; None if one cannot tell."""
    answers = [record.has_read(sample) for record in records if record]
    return True if True in answers else None if None in answers else False
