"""`fp8kv eval --resume`: results of units of work on disk, so that an evaluation that was stopped goes on.

The file lies beside the report under a hidden name, is replaced by a rename, and is gone once the report is
there. Its first line is the SHA-256 of the rest: a line of JSON, the inputs that may not change, and results.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ParamSpec, TypeVar, cast

import torch

from calib.capture.resume import (
    NOTHING_SAVED,
    START_AGAIN,
    check_same_run,
    replace_progress,
)
from calib.errors import InputError
from calib.files.strict_json import json_text, parse_object, read_bytes
from calib.progress import SILENT, Progress

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_WRITTEN = "directory of --write"  # beside the inputs; no run compares it


@dataclass(eq=False)
class SavedResults:
    """Results of an evaluation so far; without a `path` nothing is kept."""

    path: Path | None = None
    resume: bool = False
    every_seconds: float = 0.0
    _inputs: dict[str, Any] = field(default_factory=dict)
    _earlier: dict[str, Any] = field(default_factory=dict)  # inputs
    _results: list[Any] = field(default_factory=list)
    _count: int = 0  # of the results that were asked for; with equal inputs the order is the same
    _saved_at: float = field(default_factory=time.monotonic)
    _progress: Progress = SILENT

    def open(self, inputs: dict[str, Any], types: Sequence[type]) -> None:
        """Load an earlier run's results, before text and model are; `inputs` are what is known by then.

        Results hold tensors, plain values and records of these `types`. Refuse those of a run with other
        inputs, and a damaged file.
        """
        assert self.path is not None
        self._inputs = json.loads(json_text(inputs))
        if self.path.exists():
            self._earlier, self._results = self._load(self.path, types)

    def begin(self, inputs: dict[str, Any], progress: Progress = SILENT) -> list[str]:
        """Begin a run that has these `inputs` besides, or go on with the earlier one; return warnings."""
        assert self.path is not None
        self._inputs |= json.loads(json_text(inputs))
        self._progress = progress
        if self._earlier:
            check_same_run(self.path, self._earlier, self._inputs)
        return [NOTHING_SAVED] if self.resume and not self._earlier else []

    def once(
        self, work: Callable[Arguments, Result], *args: Arguments.args, **kw: Arguments.kwargs
    ) -> Result:
        """Return the result of the next unit of `work`, which is done unless an earlier run has saved it."""
        if self.path is None:
            return work(*args, **kw)
        self._count += 1
        if self._count > len(self._results):
            self._results.append(work(*args, **kw))
            if time.monotonic() - self._saved_at >= self.every_seconds:
                replace_progress(self.path, self._write)
                self._saved_at = time.monotonic()
        else:
            self._progress.skip()
        return cast("Result", self._results[self._count - 1])

    def save_written(self, directory: Path, cache: str) -> None:
        """Save at once that this run has written `directory`, which serves `cache`."""
        if self.path is not None:
            self._inputs[_WRITTEN] = [cache, *_identify(directory)]
            replace_progress(self.path, self._write)

    def written_cache(self, directory: Path) -> str | None:
        """Return the cache that `directory` serves, if the run that this one resumes has written it."""
        if self.path is None or not (self.resume and self.path.exists() and directory.exists()):
            return None
        with self.path.open("rb") as file:
            file.readline()  # the digest, which `open` compares
            inputs = parse_object(file.readline(), f"'{self.path}'")
        cache, *identity = inputs.get(_WRITTEN, [""])
        return cache if identity == _identify(directory) else None

    def _load(self, path: Path, types: Sequence[type]) -> tuple[dict[str, Any], list[Any]]:
        digest, _, content = read_bytes(path).partition(b"\n")
        damaged = f"'{path}' is damaged (its values are not those that were written); {START_AGAIN}"
        if digest != _sha256(content):
            raise InputError(damaged)
        run, _, results = content.partition(b"\n")
        inputs = parse_object(run, f"'{path}'")
        check_same_run(path, inputs, self._inputs)
        try:
            with torch.serialization.safe_globals([*types]):  # nothing else is made of what a file says
                saved = torch.load(BytesIO(results), weights_only=True)
        except (UnpicklingError, RuntimeError, ValueError) as error:
            raise InputError(damaged) from error
        if not isinstance(saved, list):
            raise InputError(damaged)
        return inputs, saved

    def _write(self, scratch: Path) -> None:
        buffer = BytesIO()
        buffer.write(json_text(self._inputs).encode() + b"\n")
        torch.save(self._results, buffer)
        content = buffer.getbuffer()  # no copy
        with scratch.open("wb") as file:
            file.write(_sha256(content) + b"\n")
            file.write(content)


UNSAVED = SavedResults()


def results_file(report: Path) -> Path:
    """Return the place of the results of an evaluation whose report will be the directory `report`."""
    path = Path(os.path.realpath(report))
    return path.with_name(f".{path.name}.evaluation.progress")


def _identify(directory: Path) -> list[Any]:
    status = directory.stat()
    return [os.path.realpath(directory), status.st_ino, status.st_mtime_ns]


def _sha256(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
