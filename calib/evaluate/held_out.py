"""Documents that nothing in an evaluation was calibrated on, as their contents tell."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from calib.data import CalibrationData
from calib.errors import InputError
from calib.files.fingerprint import baked_for
from calib.files.model_directory import open_model_directory
from calib.files.names import BAKE_FILE
from calib.scales.stats_file import load_records
from calib.scales.text_records import Records, TextRecord, read_records

Readers = Mapping[str, Records]  # what each has read, by its name in messages
OWN = "this evaluation"
_MORE_LOADS = 3  # each of more than twice as many samples as the one before


class HeldOut(NamedTuple):
    """Loaded samples, and documents among them that nobody has read."""

    data: CalibrationData
    documents: list[list[int]]
    warnings: list[str]


def find_readers(scales: Sequence[Path], model: Path) -> tuple[Readers, list[str]]:
    """Read what the text of each of `scales` was, and of a baked `model`; warn where none says."""
    readers = {f"'{path}'": load_records(path) for path in scales}
    if baked_for(open_model_directory(model, weights=False)):
        readers[f"'{model}'"] = read_records(model / BAKE_FILE)
    unknown = [name for name, records in readers.items() if None in records]
    return readers, [
        f"{name} has no record of the text behind its scales, so some of the held-out text may "
        "not be new to it; calibrate again to have one"
        for name in unknown
    ]


def with_own(readers: Readers, samples: Sequence[Sequence[int]]) -> Readers:
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

    `load` returns so many samples as it is given, or all there are. InputError if not even `least`
    of them, by default all, are left.
    """
    wanted = own + documents
    data = load(wanted)
    warnings, search = data.warnings, _search(data.samples, own, documents, readers)
    for _ in range(_MORE_LOADS):
        if len(search.documents) == documents or len(data.samples) < wanted:
            break
        wanted = 2 * wanted + _most_read(readers, max(map(len, data.samples)))
        data = replace(load(wanted), warnings=warnings)
        search = _search(data.samples, own, documents, readers)
    needed = documents if least is None else least
    if len(search.documents) < needed:
        raise InputError(search.refusal(data, own, needed))
    return HeldOut(data, search.documents, search.warnings())


class _Search(NamedTuple):
    """Documents that nobody has read, and how many were left out before there were enough."""

    documents: list[list[int]]
    read: Counter[str]  # by the reader
    short: int  # of which a reader cannot tell

    @property
    def examined(self) -> int:
        return len(self.documents) + self.read.total() + self.short

    def warnings(self) -> list[str]:
        lines = [
            f"{count} of {self.examined} documents were left out: {name} was calibrated on their "
            "text, or on much of it"
            for name, count in self.read.items()
        ]
        if self.short:
            lines.append(
                f"{self.short} of {self.examined} documents were left out: they are too short to "
                "tell whether scales were calibrated on them"
            )
        return lines

    def refusal(self, data: CalibrationData, own: int, needed: int) -> str:
        if not self.read and not self.short:
            first = f", {own} of them to calibrate on" * bool(own)
            return (
                f"'{data.source}' has {len(data.samples)} samples, and {own + needed} are needed"
                f"{first}: use a larger dataset, or a smaller --samples or --seq-len"
            )
        why = [f"{name} read {count} others" for name, count in self.read.items()]
        why += [f"{self.short} are too short to tell"] * bool(self.short)
        return (
            f"{len(self.documents)} of {self.examined} documents of '{data.source}' are new, and "
            f"{needed} are needed: {', '.join(why)}; use another dataset"
        )


def _search(samples: Sequence[list[int]], own: int, documents: int, readers: Readers) -> _Search:
    """Look for `documents` that are new to `readers` and to the first `own` samples."""
    readers = with_own(readers, samples[:own])
    new: list[list[int]] = []
    read: Counter[str] = Counter()
    short = 0
    for sample in samples[own:]:
        if len(new) == documents:
            break
        told = {name: _has_read(records, sample) for name, records in readers.items()}
        if name := next((name for name, said in told.items() if said), None):
            read[name] += 1
        elif None in told.values():
            short += 1
        else:
            new.append(sample)
    return _Search(new, read, short)


def _has_read(records: Records, sample: Sequence[int]) -> bool | None:
    said = [record.has_read(sample) for record in records if record]
    return True if True in said else None if None in said else False


def _most_read(readers: Readers, seq_len: int) -> int:
    """Count the samples of `seq_len` tokens that readers can know."""
    known = [record for records in readers.values() for record in records if record]
    return sum(record.samples + record.tokens // seq_len for record in known)
