"""Check arguments of the Python API by their annotations, and turn them into paths."""

import inspect
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from calib.errors import InputError, did_you_mean

P = ParamSpec("P")
T = TypeVar("T")

_NUMBERS = {int: numbers.Integral, float: numbers.Real}
_NAMES = {NoneType: "None", os.PathLike: "Path"}
_MAKERS = {"Recipe": "calib.load_recipe", "KVStats": "calib.load_stats", "KVScales": "calib.load_scales"}


def to_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` as a Path with `~` expanded; InputError if it cannot be a path."""
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise InputError("a path is empty or holds a zero byte; give the name of a file or folder")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"'{path}': this user has no home folder; give a full path") from None


def check_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate `function` so that an argument of another type than annotated is an InputError.

    A missing or unknown argument stays Python's own TypeError.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            values = signature.bind(*args, **kwargs).arguments
        except TypeError:  # raised again by the call below, with the function's name
            values = {}
        check_values(values, function)
        return function(*args, **kwargs)

    return wrapper


def check_values(values: Mapping[str, Any], annotated: Any) -> None:
    """Raise an InputError for the first of `values` whose type is not the one that `annotated` gives."""
    for name, annotation in get_type_hints(annotated).items():
        if name in values:
            _check_value(name, values[name], annotation)


def _check_value(name: str, value: Any, annotation: Any) -> None:
    types = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    match = next((type_ for type_ in types if _is_instance(value, type_)), None)
    if match is None:
        literals = [word for type_ in types if get_origin(type_) is Literal for word in get_args(type_)]
        words = [repr(word) for word in literals]
        kinds = [get_origin(type_) or type_ for type_ in types if get_origin(type_) is not Literal]
        words += [_NAMES.get(kind) or str(getattr(kind, "__name__", kind)) for kind in kinds]
        legal = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
        close = did_you_mean(value, literals) if isinstance(value, str) else ""
        maker = "".join(f"; {_MAKERS[word]} makes one" for word in words if word in _MAKERS)
        raise InputError(f"{name} must be {legal}, got {_describe(value)}{close}{maker}")
    if get_origin(match) in (dict, Mapping):
        key_type, item_type = get_args(match)
        for key, item in value.items():
            _check_value(f"a key of {name}", key, key_type)
            _check_value(f"{name}['{key}']", item, item_type)


def _is_instance(value: object, annotation: Any) -> bool:
    kind = get_origin(annotation) or annotation
    if kind is Literal:
        return isinstance(value, str) and value in get_args(annotation)
    # an iterable is checked by whoever reads its items
    if kind in (Any, Iterable) or not isinstance(kind, type):
        return True
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    # isinstance(AbsMax, Observer) is True of a protocol, but the class is not an observer
    return isinstance(value, kind) and not isinstance(value, type)


def _describe(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    is_short = isinstance(value, (str, bytes, int, float, NoneType, PurePath))
    return f"{value!r:.60}" if is_short else f"a {type(value).__name__}"
