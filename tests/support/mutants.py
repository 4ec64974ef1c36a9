"""Copies of the runtime with one thing wrong."""

import shutil
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from paged import load_runtime

import fp8kv_runtime

SOURCE, _numbers = Path(fp8kv_runtime.__file__).parent, count()


@contextmanager
def copied(directory, changed=None):
    """The runtime's modules under a name of their own, with `changed`: sources by file; gone afterwards."""
    name = f"fp8kv_mutant_{next(_numbers)}"
    package = directory / name
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("hf", "__pycache__"))
    for file, source in (changed or {}).items():
        (package / file).write_text(source)
    for path in package.rglob("*.py"):
        path.write_text(path.read_text().replace("fp8kv_runtime", name))
    sys.path.insert(0, str(directory))
    try:
        yield load_runtime(name)
    finally:
        sys.path.remove(str(directory))
        for module in [m for m in sys.modules if m.split(".")[0] == name]:
            del sys.modules[module]


def mutate(source, *replacements):
    """Put the second text of each pair in place of the first, which is there once."""
    for old, new in replacements:
        assert source.count(old) == 1, f"{source.count(old)} of {old!r}"
        source = source.replace(old, new)
    return source
