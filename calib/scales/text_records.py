"""Records of the text behind scales, in `fp8kv_text.json`, statistics or baked models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from calib.errors import InputError, first_problem
from calib.files.names import STATS_FILE, TEXT_FILE
from calib.files.strict_json import json_text, read_object
from calib.scales.stats import KVStats
from calib.scales.stats_file import load_stats
from calib.scales.text_summary import TextRecord

Records = tuple[TextRecord | None, ...]  # None: of text that is not known


class RecordsFile(BaseModel):
    """The part of a JSON file that records text."""

    model_config = ConfigDict(strict=True)
    records: list[TextRecord | None] = [None]


def load_records(directory: Path) -> Records:
    """Read the records of the text behind the scales in `directory`, as far as it has any."""
    if (directory / STATS_FILE).exists():
        return records_of(load_stats(directory))
    return read_records(directory / TEXT_FILE) if (directory / TEXT_FILE).exists() else (None,)


def records_of(stats: KVStats) -> Records:
    """Return the records of the text that `stats` are of, as far as they have any."""
    return (stats.text and stats.text.records) or (None,)


def save_records(records: Records, directory: Path) -> None:
    """Write `records` if any text is known."""
    if any(records):
        (directory / TEXT_FILE).write_text(json_text(records_json(records)) + "\n")


def records_json(records: Sequence[TextRecord | None]) -> dict[str, Any]:
    """Return `records` as an object that `read_records` reads."""
    return {"records": [record and record.model_dump() for record in records]}


def read_records(file: Path) -> Records:
    """Read the records in a JSON file, as `save_records` or a bake writes it."""
    try:
        return tuple(RecordsFile.model_validate(read_object(file)).records)
    except ValidationError as error:
        raise InputError(
            f"'{file}' is damaged ({first_problem(error)}); calibrate or convert again"
        ) from None
