"""Random small mistakes in the shipped code: which there could be, a sample of them, and one applied."""

import ast
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
KINDS = ("comparison", "constant", "operator", "statement")
# a dropped assignment to a name would only be a NameError
Statement = ast.Expr | ast.AugAssign | ast.Raise | ast.Return | ast.Delete | ast.Continue | ast.Break


@dataclass(frozen=True)
class Mutant:
    """One mistake: the `index`-th node of `kind` in `file`."""

    file: str
    kind: str
    index: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before[:40]!r} -> {self.after[:40]!r}"


def find_mutants(root: Path) -> list[Mutant]:
    """Return every mutant of the shipped modules under `root`."""
    files = sorted(path for room in ("calib", "fp8kv_runtime") for path in (root / room).rglob("*.py"))
    return [mutant for path in files for mutant in mutants_of(path.read_text(), str(path.relative_to(root)))]


def mutants_of(source: str, file: str) -> Iterator[Mutant]:
    """Yield every mutant of one file."""
    tree = ast.parse(source)
    for kind in KINDS:
        for index, (parent, _, node) in enumerate(_places(tree, kind)):
            if isinstance(parent, ast.Module) and kind == "statement":
                continue  # what a module does when it is imported
            yield Mutant(file, kind, index, node.lineno, ast.unparse(node), ast.unparse(_changed(node)))


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` of the mutants, as many of each kind."""
    numbers = random.Random(seed)
    parts = [[mutant for mutant in mutants if mutant.kind == kind] for kind in KINDS]
    sizes = [count // len(KINDS) + (i < count % len(KINDS)) for i in range(len(KINDS))]
    return [
        mutant
        for part, size in zip(parts, sizes, strict=True)
        for mutant in numbers.sample(part, min(size, len(part)))
    ]


def apply(source: str, mutant: Mutant) -> str:
    """Return the source with the mistake."""
    tree = ast.parse(source)
    parent, field, node = list(_places(tree, mutant.kind))[mutant.index]
    assert ast.unparse(node) == mutant.before, f"{mutant.file} is another than the sample was taken of"
    value = getattr(parent, field)
    if isinstance(value, list):
        value[next(i for i, item in enumerate(value) if item is node)] = _changed(node)
    else:
        setattr(parent, field, _changed(node))
    return ast.unparse(ast.fix_missing_locations(tree))


def _places(tree: ast.AST, kind: str) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yield parent, field and node of everything of `kind`, without annotations and docstrings."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                if _is_of_kind(node, kind):
                    yield tree, field, node
                yield from _places(node, kind)


def _is_of_kind(node: ast.AST, kind: str) -> bool:
    if kind == "comparison":
        return isinstance(node, ast.Compare)
    if kind == "constant":
        return isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float)
    if kind == "operator":
        has_other = isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS
        text = isinstance(node, ast.BinOp) and any(
            isinstance(n, ast.JoinedStr) for n in (node.left, node.right)
        )
        return (has_other and not text) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)  # a docstring
    if isinstance(node, ast.Assign):
        return not isinstance(node.targets[0], ast.Name | ast.Tuple)
    returns_none = isinstance(node, ast.Return) and ast.unparse(node) in ("return", "return None")
    return isinstance(node, Statement) and not returns_none


def _changed(node: ast.AST) -> ast.AST:
    changed = deepcopy(node)
    if isinstance(changed, ast.Compare):
        changed.ops[0] = COMPARISONS[type(changed.ops[0])]()
    elif isinstance(changed, ast.Constant):
        value = changed.value
        if isinstance(value, bool):
            changed.value = not value
        elif isinstance(value, int):
            changed.value = value + 1
        else:
            changed.value = value * 1.5 or 1.0
    elif isinstance(changed, ast.BinOp | ast.BoolOp):
        changed.op = OPERATORS[type(changed.op)]()
    elif isinstance(changed, ast.UnaryOp):
        return changed.operand
    else:
        return ast.Pass()
    return changed
