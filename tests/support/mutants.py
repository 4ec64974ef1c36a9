"""Copies of the runtime with one thing wrong."""

import ast
import shutil
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from paged import load_runtime

import fp8kv_runtime

SOURCE = Path(fp8kv_runtime.__file__).parent
_numbers = count()


class _Replaced(ast.NodeTransformer):
    def __init__(self, old, new):
        self._old, self._new, self.count = ast.dump(old), new, 0

    def visit(self, node):
        if ast.dump(node) != self._old:
            return self.generic_visit(node)
        self.count += 1
        return self._new


def mutate(tree, old, new, function=None):
    """Put `new` in place of `old`, in the named function if any; exactly one node must match."""
    (before,), after = ast.parse(old).body, ast.parse(new).body
    if isinstance(before, ast.Expr) and isinstance(after[0], ast.Expr):
        before, after = before.value, after[0].value
    named = [n for n in ast.walk(tree) if getattr(n, "name", None) == function]
    replaced = _Replaced(before, after)
    for place in named if function else [tree]:
        replaced.visit(place)
    assert replaced.count == 1, f"{replaced.count} of {old!r} in {function or 'the file'}"


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


def mutated(file, *replacements):
    tree = ast.parse((SOURCE / file).read_text())
    for replacement in replacements:
        mutate(tree, *replacement)
    return ast.unparse(tree)
