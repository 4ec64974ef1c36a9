"""Strict YAML: no duplicate keys, no yes for a number, and one line for what is wrong."""

import re
import reprlib
from collections.abc import Iterator
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError, ValidatorFunctionWrapHandler, field_validator

from calib.errors import InputError, did_you_mean, one_line

_MAX_ALIASES = 20  # each may stand for all before it, so that few lines could fill the memory
_MAX_QUOTED = 300
# pydantic's names for members of a union
_NUMBERS = (".constrained-int", ".constrained-float")


class StrictModel(BaseModel, extra="forbid", frozen=True):
    """Settings without unknown keys, and without `yes` in place of a number."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _refuse_yes_for_a_number(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        result = validate(value)
        if isinstance(value, bool) and not isinstance(result, bool):
            raise ValueError(f"needs a number, not {str(value).lower()}")
        return result


class _Loader(yaml.SafeLoader):
    aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.aliases += self.check_event(yaml.AliasEvent)
        if self.aliases > _MAX_ALIASES:
            raise yaml.YAMLError(f"more than {_MAX_ALIASES} aliases")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        names = [key.value for key in keys]
        for number, key in enumerate(keys):
            if key.value in names[:number]:
                raise yaml.YAMLError(f"'{key.value}' is given twice, again in line {key.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def read_yaml(text: str, source: str) -> Any:
    """Read a YAML document, or raise an InputError that names `source`."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        reason = "nested too deep"
    except (yaml.YAMLError, ValueError) as error:  # ValueError: impossible dates and numbers
        reason = one_line(error, _MAX_QUOTED)
    raise InputError(f"cannot read {source[:_MAX_QUOTED]}: {reason}")


def _dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        # to Python 3.10 tuple[str, ...] is a type
        kind = None if get_origin(field.annotation) else field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _dotted_keys(kind, f"{prefix}{name}.")


def explain(source: str | None, error: ValidationError, model: type[BaseModel]) -> str:
    """Return one line that says why the document from `source` is not a `model`."""
    problems = error.errors()
    first = problems[0]
    dotted = ".".join(map(str, first["loc"]))
    where = f"recipe '{source}'" if source else "recipe"
    if first["type"] == "extra_forbidden":
        *parents, leaf = map(str, first["loc"])
        homes = [f"'{key}'" for key in _dotted_keys(model) if f".{key}".endswith(f".{leaf}")]
        for part in parents:
            model = model.model_fields[part].annotation  # type: ignore[assignment]
        legal = [*model.model_fields]
        suggestion = f" (did you mean {' or '.join(homes)}?)" if homes else did_you_mean(leaf, legal)
        if "." in leaf and homes:  # as --set takes it
            section, _, name = leaf.partition(".")
            suggestion = f" (write `{section}: {{{name}: ...}}`)"
        return f"{where}: unknown key '{dotted}'{suggestion}; legal keys here: {', '.join(legal)}"
    message = first["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    if first["type"] == "model_type":  # a class of ours means nothing to whoever wrote the file
        message = f"Input should be keys with values, as in `{dotted}: {{KEY: VALUE}}`"
    if dotted.endswith(_NUMBERS):  # one member of a union; the next problem is of another
        message += f", or {problems[1]['msg'].removeprefix('Input should be ')}"
        dotted = dotted.rpartition(".")[0]
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200
    try:
        value = "" if first["type"] == "value_error" else f", got {short.repr(first['input'])}"
    except ValueError:  # Python refuses to write integers of thousands of digits
        value = ", got a number of too many digits"
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        value += did_you_mean(first["input"], re.findall("'([^']+)'", first["ctx"]["expected"]))
    return ": ".join(filter(None, (where, dotted, f"{message}{value}")))
