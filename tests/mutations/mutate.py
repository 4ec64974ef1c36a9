"""Random small mistakes in the shipped code: which there could be, a sample of them, and one applied."""

import ast
import random
from copy import copy
from dataclasses import dataclass

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
DROPS = ast.Expr | ast.Assign | ast.AugAssign | ast.Raise | ast.Return | ast.Delete | ast.Continue | ast.Break


@dataclass(frozen=True)
class Mutant:
    file: str
    kind: str
    index: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before[:40]!r} -> {self.after[:40]!r}"


def find_mutants(root):
    files = sorted(path for room in ("calib", "fp8kv_runtime") for path in (root / room).rglob("*.py"))
    return [mutant for path in files for mutant in mutants_of(path.read_text(), str(path.relative_to(root)))]


def mutants_of(source, file):
    for kind in KINDS:
        for index, (parent, _, node, new) in enumerate(_places(ast.parse(source), kind)):
            if not isinstance(parent, ast.Module) or kind != "statement":  # which an import runs
                yield Mutant(file, kind, index, node.lineno, ast.unparse(node), ast.unparse(new))


def sample(mutants, count, seed):
    numbers, found = random.Random(seed), []
    for i, kind in enumerate(KINDS):
        part = [mutant for mutant in mutants if mutant.kind == kind]
        found += numbers.sample(part, min(count // len(KINDS) + (i < count % len(KINDS)), len(part)))
    return found


def apply(source, mutant):
    tree = ast.parse(source)
    parent, field, node, new = list(_places(tree, mutant.kind))[mutant.index]
    assert ast.unparse(node) == mutant.before, f"{mutant.file} is another than the sample was taken of"
    value = getattr(parent, field)
    if isinstance(value, list):
        new = [new if item is node else item for item in value]
    setattr(parent, field, new)
    return ast.unparse(ast.fix_missing_locations(tree))


def _places(tree, kind):
    """Yield parent, field, node and its mistake of this kind, without annotations and docstrings."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                if (found := _mistake(node)) and found[0] == kind:
                    yield tree, field, node, found[1]
                yield from _places(node, kind)


def _mistake(node):
    new = copy(node)
    if isinstance(node, ast.Compare):
        new.ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        return "comparison", new
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        new.value = node.value + 1 if isinstance(node.value, int) else node.value * 1.5 or 1.0
        new.value = not node.value if isinstance(node.value, bool) else new.value
        return "constant", new
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "operator", node.operand
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
        new.op = OPERATORS[type(node.op)]()
        text = isinstance(node, ast.BinOp) and ast.JoinedStr in (type(node.left), type(node.right))
        return None if text else ("operator", new)
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    binds = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple)
    returns_none = isinstance(node, ast.Return) and ast.unparse(node) in ("return", "return None")
    dropped = isinstance(node, DROPS) and not (is_docstring or binds or returns_none)
    return ("statement", ast.Pass()) if dropped else None
