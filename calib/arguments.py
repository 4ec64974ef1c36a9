"""Arguments as people type them: checked by their annotations in one line; paths of any kind."""

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
_MAKERS = {
    "Recipe": "calib.load_recipe",
    "KVStats": "calib.load_stats",
    "KVScales": "calib.load_scales",
}


def as_path(given: str | os.PathLike[str]) -> Path:
    """Return `given` as a path, `~` as the home folder; an InputError if it can be none."""
    if not os.fspath(given) or "\0" in os.fspath(given):
        raise InputError("a path is empty or holds a zero byte; give the name of a file or folder")
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise InputError(f"'{given}': this user has no home folder; give a full path") from None


def check_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Make arguments that are not as `function` annotates them an InputError of one line.

    Names that are missing or unknown are Python's TypeError, as ever.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            values = signature.bind(*args, **kwargs).arguments
        except TypeError:  # the call below says it with the function's name
            values = {}
        check_values(values, function)
        return function(*args, **kwargs)

    return wrapper


def check_values(values: Mapping[str, Any], annotated: Any) -> None:
    """Raise an InputError for the first of `values` that is not as `annotated` says."""
    for name, kind in get_type_hints(annotated).items():
        if name in values:
            _check(name, values[name], kind)


def _check(name: str, value: Any, kind: Any) -> None:
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    fitting = next((each for each in kinds if _fits(value, each)), None)
    if fitting is None:
        *others, last = [word for each in kinds for word in _words(each)]
        wanted = " or ".join(filter(None, (", ".join(others), last)))
        maker = next((_MAKERS[each] for each in map(_named, kinds) if each in _MAKERS), None)
        hint = f"; {maker} makes one" if maker else ""
        legal = [word for each in kinds if get_origin(each) is Literal for word in get_args(each)]
        close = did_you_mean(value, legal) if isinstance(value, str) else ""
        raise InputError(f"{name} must be {wanted}, got {_shown(value)}{close}{hint}")
    if get_origin(fitting) in (dict, Mapping):
        for key, item in value.items():
            _check(f"a key of {name}", key, get_args(fitting)[0])
            _check(f"{name}['{key}']", item, get_args(fitting)[1])


def _fits(value: object, kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    # of what is read item by item, the reader says what is wrong
    if origin in (Any, Iterable) or not isinstance(origin, type):
        return True
    if origin in _NUMBERS:
        return isinstance(value, _NUMBERS[origin]) and not isinstance(value, bool)
    # a class has the methods of a protocol, and cannot be called as an object of it
    return isinstance(value, origin) and not isinstance(value, type)


def _words(kind: Any) -> list[str]:
    return [*map(repr, get_args(kind))] if get_origin(kind) is Literal else [_named(kind)]


def _named(kind: Any) -> str:
    kind = get_origin(kind) or kind
    return _NAMES.get(kind) or str(getattr(kind, "__name__", kind))


def _shown(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    plain = isinstance(value, (str, bytes, int, float, NoneType, PurePath))
    return f"{value!r:.60}" if plain else f"a {type(value).__name__}"
