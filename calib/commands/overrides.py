"""Command-line flags to recipe keys."""

from typing import Any

from calib.errors import InputError
from calib.recipe import DataRecipe, EvaluationRecipe, ExportRecipe, Recipe
from calib.strict_yaml import read_yaml

_FIELDS = {
    "data": DataRecipe.model_fields,
    "export": ExportRecipe.model_fields,
    "evaluation": EvaluationRecipe.model_fields,
}
# flags that are not called what their key is
_KEYS = {
    "observer": "observer.name",
    "format": "export.formats",
    "search": "evaluation.kl_budget",
}
_COMMA_SEPARATED = ("variants", "caches", "tasks")


def overrides(params: dict[str, Any], sections: tuple[str, ...] = ("data", "export")) -> dict[str, Any]:
    """Recipe keys of the flags that were given; the last of `sections` that has a name wins."""
    keys = {name: name for name in Recipe.model_fields}
    for section in sections:
        keys |= {name: f"{section}.{name}" for name in _FIELDS[section]}
    keys |= _KEYS
    # 0 is a value, and equals False
    given = {name: x for name, x in params.items() if x is not False and x not in (None, [], ())}
    given |= {name: given[name].split(",") for name in _COMMA_SEPARATED if name in given}
    return {keys[name]: value for name, value in given.items() if name in keys}


def assignments(pairs: list[str]) -> dict[str, Any]:
    """Recipe keys of `--set KEY=VALUE`, the values read as YAML."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise InputError(f"--set takes KEY=VALUE, such as data.column=text; got '{pair}'")
        found[key] = read_yaml(value, f"--set '{pair}'")
    return found
