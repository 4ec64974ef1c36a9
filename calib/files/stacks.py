"""Stacks of layers in weights, and whether a config is of as many; without torch."""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import filterfalse
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.files.file_names import SINGLE_FILE
from calib.files.folder import LAYER_KEYS, read_index
from calib.files.headers import read_header
from calib.files.names import is_of_cache, is_of_senses

_IN_STACK = re.compile(r"(?P<stack>(?:[^.\d][^.]*\.)*)(?P<layer>\d{1,6})\.(?P<rest>.+)")
_DECODER = re.compile(r"(?:.+\.)?(?:layers?|h|blocks)\.")  # what stacks of decoders are called
# layers after the model's own guess further tokens, and have these beside what all have
_GUESSES = re.compile(r"(?:eh_proj|enorm|hnorm|shared_head)\b")


def stored_names(path: Path) -> Iterable[str]:
    """Names of tensors in the directory `path`, as far as an index or a single file tells."""
    single = path / SINGLE_FILE
    return read_index(path) or (read_header(single) if single.exists() else ())


def check_layers(path: Path, config: dict[str, Any], names: Iterable[str]) -> None:
    """Refuse a config.json in `path` of another number of layers than weights called `names` have.

    Towers and other stacks may have any number, if one stack has that of the config.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    key = next((key for key in LAYER_KEYS if type(text.get(key)) is int), None)
    if key is None or text[key] < 1:
        return
    sizes, layers, guessing = Counter[str](), set[tuple[str, int]](), set[tuple[str, int]]()
    for name in names:
        match = _IN_STACK.match(name)
        if match and not is_of_cache(name):
            place = match["stack"], int(match["layer"])
            sizes[match["stack"]] += 1
            (guessing if _GUESSES.match(match["rest"]) else layers).add(place)
    numbers = dict.fromkeys(filterfalse(is_of_senses, sizes), 0)
    for stack, layer in layers - guessing:
        if stack in numbers:
            numbers[stack] = max(numbers[stack], layer + 1)
    stacks = (stack for stack, _ in sizes.most_common() if stack in numbers)
    largest = next(filter(_DECODER.fullmatch, stacks), None)
    if largest is not None and text[key] not in numbers.values():
        raise InputError(
            f"config.json of '{path}' says {key} {text[key]}, but the weights have "
            f"{numbers[largest]} layers; download the model again"
        )
