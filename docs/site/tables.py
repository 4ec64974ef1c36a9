"""Markdown tables, also of JSON schemas."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of a table; bars in cells are escaped, and what HTML would take for a tag."""
    lines = [titles, ["---"] * len(titles), *([_cell(x) for x in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    parts = re.split(r"(`[^`]*`)", " ".join(text.replace("|", "\\|").split()))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def schema_tables(schema: Schema, names: Mapping[str, str] | None = None) -> str:
    """Make a table of the object itself, then one of each of its parts; `names` rename parts."""
    parts: Schema = schema.get("$defs", {})
    called = {part: (names or {}).get(part, part) for part in parts}
    of_parts = (f"## {called[part]}\n\n{_table(parts[part], called)}" for part in parts)
    return "\n".join((_table(schema, called), *of_parts))


def _table(part: Schema, called: Mapping[str, str]) -> str:
    if "properties" not in part:
        return f"{part.get('description', '')}\n\n{_type(part, called)}\n"
    rows = [
        (f"`{key}`", _type(value, called), _default(value), value.get("description", ""))
        for key, value in part["properties"].items()
    ]
    return f"{part.get('description', '')}\n\n{table(('key', 'value', 'default', ''), rows)}"


def _default(value: Schema) -> str:
    has_parts = "$ref" in value or value.get("type") == "object"
    if "default" not in value or has_parts:
        return ""
    return f"`{json.dumps(value['default'])}`"


def _type(value: Schema, called: Mapping[str, str]) -> str:
    """Describe in words what may stand there."""
    if "$ref" in value:
        name = called[value["$ref"].rpartition("/")[2]]
        return f"[{name}](#{name.lower()})"
    for alike in ("anyOf", "oneOf"):
        if alike in value:
            return " or ".join(_type(each, called) for each in value[alike])
    if "const" in value or "enum" in value:
        return ", ".join(f"`{each}`" for each in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        return _list(value, called)
    if isinstance(value.get("additionalProperties"), dict):
        return f"name to {_type(value['additionalProperties'], called)}"
    return f"{value.get('type', 'any')}{_limits(value)}"


def _list(value: Schema, called: Mapping[str, str]) -> str:
    if "prefixItems" in value:
        return f"[{', '.join(_type(each, called) for each in value['prefixItems'])}]"
    return f"list of {_type(value.get('items', {}), called)}"


_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _limits(value: Schema) -> str:
    limits = [f"{sign} {value[key]:g}" for key, sign in _SIGNS.items() if key in value]
    return f" {' and '.join(limits)}" if limits else ""
