"""JSON that every reader takes: it has no word for what is no finite number."""

import json
from math import isfinite
from typing import Any

from calib.errors import InputError


def json_text(document: Any, **form: Any) -> str:
    """`document` as JSON, null where a number is not finite; `form` as of `json.dumps`."""
    return json.dumps(_with_nulls(document), allow_nan=False, **form)


def exact_json_text(document: Any, what: str, **form: Any) -> str:
    """`document` as JSON; InputError, which begins with `what`, where a number is not finite."""
    try:
        return json.dumps(document, allow_nan=False, **form)
    except ValueError as error:
        raise InputError(f"{what} cannot be written as JSON: {error}; calibrate again") from None


def _with_nulls(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _with_nulls(each) for key, each in value.items()}
    return [*map(_with_nulls, value)] if isinstance(value, list | tuple) else value
