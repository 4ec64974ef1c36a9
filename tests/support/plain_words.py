"""Find names and sentences that hide what they mean."""

import ast
import re
from collections import defaultdict

from house import ROOT

# participles, pronouns and adverbs: a name says what a thing is, not that it was found
VAGUE_NAMES = {
    *("about", "alike", "asked", "done", "each", "found", "given", "held", "here", "kept", "known", "like"),
    *("made", "mine", "more", "other", "others", "rest", "said", "same", "says", "seen", "such", "taken"),
    *("theirs", "them", "there", "these", "those", "told", "wanted", "what", "which"),
}
PREPOSITION = re.compile(r"_*(as|at|by|for|in|no|of|on|with|without)_")
OPENING = re.compile(
    r"(As|At|By|For|How|If|In|It|Of|On|One|Ones|So|That|There|These|Those|What|When|Where|Whether|Which|Who|Why|With|"
    r"Without)\b"
)
TENSOR, SHAPE = re.compile(r"\bTensor\b"), re.compile(r"\[[^][]*\]|any shape")
LETTERS_PAGE = ROOT / "docs" / "reference" / "python.md"
LETTERS = set(re.findall(r"`([A-Z])`", LETTERS_PAGE.read_text()))
NO_ARTICLE = re.compile(r"\b(are|is|was|were) no\b")


def offences(file):
    source = file.read_text()
    for node in ast.walk(ast.parse(source)):
        for name, line in _lasting_names(node):
            if name.strip("_").lower() in VAGUE_NAMES:
                yield line, f"the name '{name}' does not say what it is"
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        docstring = ast.get_docstring(node) if is_function or isinstance(node, ast.ClassDef) else None
        if opening := OPENING.match(docstring or ""):
            yield node.lineno, f"the docstring of {node.name} begins with '{opening[0]}'"
        is_property = is_function and any(ast.unparse(x).endswith("property") for x in node.decorator_list)
        is_predicate = is_property and docstring and node.returns and ast.unparse(node.returns) == "bool"
        if is_predicate and not docstring.startswith("Return whether "):
            yield node.lineno, f"the docstring of {node.name} does not begin with 'Return whether'"
        if is_function and PREPOSITION.match(node.name):
            yield node.lineno, f"the function {node.name} begins with a preposition"
    for number, line in enumerate(source.splitlines(), 1):
        if match := NO_ARTICLE.search(line):
            yield number, f"write 'not a' in place of '{match[0].split()[1]}' in '{match[0]}'"


def shape_offences(file):
    """Yield public functions, fields and types with tensors of which no shape is said, and unknown letters.

    A type says it where it is defined, so that what takes it need not.
    """
    lines, owners = file.read_text().splitlines(), [ast.parse(file.read_text())]
    for owner in owners:
        owners += [x for x in owner.body if isinstance(x, ast.ClassDef)]
        for name, line, types, text in _typed(owner, lines):
            is_public = name == "__init__" or not name.startswith("_")
            if is_public and any(x and TENSOR.search(ast.unparse(x)) for x in types):
                if not SHAPE.search(text):
                    yield line, f"{name} has a tensor, and does not say of which shape"
                if letters := set(re.findall(r"\b[A-Z]\b", " ".join(SHAPE.findall(text)))) - LETTERS:
                    yield line, f"{name} has a shape of {sorted(letters)}, which {LETTERS_PAGE.name} lacks"


def _typed(owner, lines):
    """Yield functions with their docstring, `__init__` with that of its class; others with comments."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            types = [*(x.annotation for x in ast.walk(node.args) if isinstance(x, ast.arg)), node.returns]
            sources = (owner, node) if node.name == "__init__" else (node,)
            text = " ".join(ast.get_docstring(x) or "" for x in sources)
            yield node.name, node.lineno, types, text
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            is_type = isinstance(node.value, ast.BinOp | ast.Name | ast.Subscript)  # Edit = Tensor | ...
            types = [getattr(node, "annotation", None), node.value if is_type else None]
            first = node.lineno - 1 - lines[node.lineno - 2].strip().startswith("#")
            text = " ".join(line.partition("#")[2] for line in lines[first : node.end_lineno])
            yield re.match(r"[\w.]+", ast.unparse(node))[0], node.lineno, types, text


def _lasting_names(node):
    """Yield names of parameters, assignments, loops, `with` and `except`; not those of comprehensions."""
    if isinstance(node, ast.arg):
        yield node.arg, node.lineno
    if isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name, node.lineno
    single = (ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor)
    targets = [node.target] if isinstance(node, single) else getattr(node, "targets", [])
    items = node.items if isinstance(node, ast.With | ast.AsyncWith) else []
    for target in [*targets, *filter(None, (item.optional_vars for item in items))]:
        for part in ast.walk(target):
            if isinstance(part, ast.Name):
                yield part.id, part.lineno


def class_homes(files):
    homes = defaultdict(list)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(file)
    return homes
