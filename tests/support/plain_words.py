"""Find names and sentences that hide what they mean."""

import ast
import re
from collections import defaultdict

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
NO_ARTICLE = re.compile(r"\b(are|is|was|were) no\b")


def offences(file):
    """Yield (line, sentence) for each name, docstring and message of `file` that breaks a rule."""
    source = file.read_text()
    for node in ast.walk(ast.parse(source)):
        for name, line in _lasting_names(node):
            if name.strip("_").lower() in VAGUE_NAMES:
                yield line, f"the name '{name}' does not say what it is"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node) or ""
            if OPENING.match(text):
                yield node.lineno, f"the docstring of {node.name} begins with '{text.split()[0]}'"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and PREPOSITION.match(node.name):
            yield node.lineno, f"the function {node.name} begins with a preposition"
    for number, line in enumerate(source.splitlines(), 1):
        if match := NO_ARTICLE.search(line):
            yield number, f"write 'not a' in place of '{match[0].split()[1]}' in '{match[0]}'"


def _lasting_names(node):
    """Yield parameters and targets of assignments; a name inside of a comprehension does not last."""
    if isinstance(node, ast.arg):
        yield node.arg, node.lineno
    targets = getattr(node, "targets", None) if isinstance(node, ast.Assign) else None
    if isinstance(node, ast.AnnAssign | ast.NamedExpr):
        targets = [node.target]
    for target in targets or ():
        for part in ast.walk(target):
            if isinstance(part, ast.Name):
                yield part.id, part.lineno


def class_homes(files):
    """Return the files that define each class, by its name."""
    homes = defaultdict(list)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(file)
    return homes
