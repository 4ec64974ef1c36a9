"""Paths of the user's machine, which stay out of what is published: the last part alone is named.

A module of its own, because what must not leak is decided here, for every file of a pack.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from calib.data.builtin import BUILTIN_PREFIX
from calib.data.local_rows import looks_local
from calib.recipe import Recipe

_START = r"(?:/|\./|\.\./|~)"
_PATH = re.compile(rf"{_START}.*", re.DOTALL)
_QUOTED = re.compile(rf"'({_START}[^']*)'")
# addresses and tags, such as </s>, hold slashes too
_UNQUOTED = re.compile(rf"(https?://\S+|</\w+>)|(?<!\w){_START}[^\s',]+")
_HUB_DATASET = re.compile(r"[^/]+(?:/[^/]+)? (?:\(.*\) )?\[.+\]")  # a dataset and its split


def hide_paths(value: Any, paths: Iterable[str]) -> Any:
    """Return `value`, a JSON document, with the last part of every path alone.

    `paths` are those whose form does not tell; all others are known by theirs.
    """
    spellings = {spelling: Path(path).name for path in paths for spelling in _spellings(path)}
    longest_first = sorted(map(re.escape, spellings), key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w/.-])({'|'.join(longest_first)})(?:/(?!\S)|(?![\w-]))")

    def hide(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [*map(hide, value)]
        if not isinstance(value, str):
            return value
        text = pattern.sub(lambda match: spellings[match[1]], value) if spellings else value
        parts = (Path(part).name if _PATH.fullmatch(part) else part for part in text.split(" + "))
        text = _QUOTED.sub(lambda match: f"'{Path(match[1]).name}'", " + ".join(parts))
        return _UNQUOTED.sub(lambda match: match[1] or Path(match[0]).name, text)

    return hide(value)


def local_paths(report: dict[str, Any], recipe: Recipe, evaluation_data: str | None) -> list[str]:
    """Return the paths that a calibration's `report` and `recipe` name, and those of an evaluation's data."""
    data, evaluation = recipe.data, recipe.evaluation
    sources = [*report["dataset"]["source"].split(" + "), *(evaluation_data or "").split(" + ")]
    paths = [source for source in sources if not _HUB_DATASET.fullmatch(source)]
    names = [data.dataset, evaluation.dataset or "", *evaluation.also, *evaluation.tasks]
    paths += [] if report.get("hub") else [report["model"]]
    paths += [x for x in names if looks_local(x) or x.count("/") > 1 or x.endswith((".yaml", ".yml"))]
    return [path for path in paths if path and not path.startswith(BUILTIN_PREFIX)]


def _spellings(path: str) -> list[str]:
    """Return how messages spell `path`, where that is not its last part alone."""
    spellings = {path.rstrip("/"), str(Path(path)), os.path.expanduser(Path(path))}
    return [spelling for spelling in spellings if Path(path).name not in ("", spelling)]
