"""Copies of the runtime with one thing wrong."""

import shutil
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from paged import load_runtime

import fp8kv_runtime

SOURCE = Path(fp8kv_runtime.__file__).parent
_numbers = count()


@contextmanager
def mutant(directory, file, *replacements):
    """The runtime's modules, `file` changed, under a name of their own; gone afterwards.

    Each replacement (old, new) must match exactly once, so that none of them goes stale unseen.
    """
    name = f"fp8kv_mutant_{next(_numbers)}"
    package = directory / name
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("hf", "__pycache__"))
    text = (package / file).read_text()
    for old, new in replacements:
        assert text.count(old) == 1, f"{file} has {text.count(old)} of {old!r}"
        text = text.replace(old, new)
    (package / file).write_text(text)
    for source in package.rglob("*.py"):
        source.write_text(source.read_text().replace("fp8kv_runtime", name))
    sys.path.insert(0, str(directory))
    try:
        yield load_runtime(name)
    finally:
        sys.path.remove(str(directory))
        for module in [m for m in sys.modules if m.split(".")[0] == name]:
            del sys.modules[module]
