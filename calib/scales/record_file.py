"""`fp8kv_text.json`: records of the text behind scales that have no statistics beside them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from calib.errors import InputError
from calib.files.names import BAKE_FILE, STATS_FILE, TEXT_FILE
from calib.files.strict_json import json_text, read_object
from calib.scales.stats import KVStats
from calib.scales.stats_file import load_stats
from calib.scales.text_record import TextRecord

Records = tuple[TextRecord | None, ...]  # None: of text that is not known


class _File(BaseModel):
    model_config = ConfigDict(strict=True)
    records: list[TextRecord | None] = [None]


def load_records(directory: Path) -> Records:
    """Read what the scales in `directory` were calibrated on, as far as it says."""
    if (directory / STATS_FILE).exists():
        return records_of(load_stats(directory))
    return _read(directory / TEXT_FILE) if (directory / TEXT_FILE).exists() else (None,)


def load_baked_records(directory: Path) -> Records:
    """Read what the factors in a baked model's weights were calibrated on."""
    return _read(directory / BAKE_FILE)


def records_of(stats: KVStats) -> Records:
    """Return what `stats` are of, as far as they say."""
    return (stats.text and stats.text.records) or (None,)


def save_records(records: Records, directory: Path) -> None:
    """Write what is known of `records`, if anything is."""
    if any(records):
        (directory / TEXT_FILE).write_text(json_text(records_json(records)) + "\n")


def records_json(records: Sequence[TextRecord | None]) -> dict[str, Any]:
    """`records` as an object that `load_records` reads."""
    return {"records": [record and record.model_dump() for record in records]}


def _read(file: Path) -> Records:
    try:
        return tuple(_File.model_validate(read_object(file)).records)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part)[:40] for part in first["loc"])
        raise InputError(f"'{file}' is damaged ({at}: {first['msg']}); calibrate or convert again") from None
