"""Where models and data lie is nobody else's business: names for paths in what is published."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from calib.data.builtin import BUILTIN_PREFIX
from calib.data.local_rows import looks_local
from calib.recipe import Recipe

_WHOLE = re.compile(r"(?:/|\./|\.\./|~).*", re.DOTALL)
_QUOTED = re.compile(r"'((?:/|\./|\.\./|~)[^']*)'")
# addresses and tags, such as </s>, hold slashes too
_WITHIN = re.compile(r"(https?://\S+|</\w+>)|(?<!\w)(?:/|\./|\.\./|~)[^\s',]+")
_OF_THE_HUB = re.compile(r"[^/]+(?:/[^/]+)? (?:\(.*\) )?\[.+\]")  # a dataset and its split
_YAML = (".yaml", ".yml")  # of tasks


def without_places(value: Any, places: Iterable[str]) -> Any:
    """`value`, a JSON document, with the last part of every path alone.

    `places` are paths whose form does not tell; all others are known by theirs.
    """
    forms = {form: Path(place).name for place in places for form in _forms(place)}
    known = [re.escape(form) for form in sorted(forms, key=len, reverse=True)]
    pattern = re.compile(rf"(?<![\w/.-])({'|'.join(known)})(?:/(?!\S)|(?![\w-]))")

    def hidden(text: str) -> str:
        text = pattern.sub(lambda match: forms[match[1]], text) if known else text
        parts = (Path(x).name if _WHOLE.fullmatch(x) else x for x in text.split(" + "))
        text = _QUOTED.sub(lambda match: f"'{Path(match[1]).name}'", " + ".join(parts))
        return _WITHIN.sub(lambda match: match[1] or Path(match[0]).name, text)

    return _mapped(value, hidden)


def places_of(said: dict[str, Any], recipe: Recipe, measured: str | None) -> list[str]:
    """The paths that a calibration's file names, whose recipe is `recipe`.

    `measured` is the data of an evaluation, None without one.
    """
    sources = [*said["dataset"]["source"].split(" + "), *(measured or "").split(" + ")]
    found = [source for source in sources if not _OF_THE_HUB.fullmatch(source)]
    found += [said["model"]] if _is_local_model(said) else []
    asked = recipe.evaluation
    named = [recipe.data.dataset, asked.dataset or "", *asked.also, *asked.tasks]
    found += [each for each in named if _looks_local(each)]
    return [place for place in found if place and not place.startswith(BUILTIN_PREFIX)]


def _is_local_model(said: dict[str, Any]) -> bool:
    """Whether the model was no Hub id, also where it is gone since."""
    # outputs of older versions do not say
    return said["hub"] is None if "hub" in said else _looks_local(said["model"])


def _looks_local(name: str) -> bool:
    return looks_local(name) or name.count("/") > 1 or name.endswith(_YAML)


def _forms(place: str) -> Iterable[str]:
    """How messages spell `place`, where that is more than its last part."""
    path = Path(place)
    spelled = {place.rstrip("/"), str(path), str(path.expanduser())}
    return (form for form in spelled if path.name and form != path.name)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    return change(value) if isinstance(value, str) else value
