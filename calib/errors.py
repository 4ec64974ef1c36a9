"""Errors of the package. A message says what was given, what is allowed and what to do."""

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


# what engines call caches that have another name here
OUR_NAMES = {"fp8_e4m3": "fp8", "fp8_inc": "fp8"}


class Fp8kvError(Exception):
    """Base of everything this package raises on purpose; the CLI prints it as one line, exit 2."""


class InputError(Fp8kvError, ValueError):
    """A flag, recipe, model directory, dataset or output path cannot be used as given."""


class NoModelError(InputError):
    """A directory holds no model."""


class NoScalesError(InputError):
    """A directory holds no KV-cache scales."""


class UnsupportedModelError(Fp8kvError):
    """The model's cache cannot be observed or scaled, or its weights cannot be changed as asked."""


class UnsupportedExportError(Fp8kvError):
    """The target format has no way to say what these scales say."""


class CalibrationError(Fp8kvError):
    """A layer saw nothing, only zeros, or NaN/Inf: no scale can be derived."""


def did_you_mean(word: str, legal: Iterable[str], most: int = 1) -> str:
    """Return a question with the legal words closest to `word`, `most` of them, or "" if none is close."""
    cutoff = 0.55 if len(word) > 3 else 0.7  # 'gpu' does not mean 'cpu'
    close = difflib.get_close_matches(OUR_NAMES.get(word, word), [*legal], n=most, cutoff=cutoff)
    if not close:
        return ""
    *names, last = map(repr, close)
    return f" (did you mean {', '.join(names)}{' or ' if names else ''}{last}?)"


def one_line(error: object, limit: int = 300) -> str:
    """Return the message of `error`, or any text, in one line of at most `limit` characters, or its start."""
    text = " ".join(str(error).split())
    if len(text) > limit:
        text = text[: limit - 4]
        text = f"{text.rpartition('. ')[0] or text.rpartition(' ')[0] or text} ..."
    # Python's own sentence names a function of sys
    return "a number has too many digits" if "set_int_max_str_digits" in text else text


def first_problem(error: "ValidationError") -> str:
    """Return where pydantic found its first problem, and which: `layers.3.module: Field required`."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part)[:80] for part in first["loc"])[:200]
    # a type's own name means nothing to whoever wrote the file
    message = re.sub(r" or (an )?instance of \w+", "", first["msg"].removeprefix("Value error, "))
    return one_line(f"{place}: {message}".removeprefix(": "))
