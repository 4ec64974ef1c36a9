"""The house: rooms, the floors that they lie on, and what they import of each other."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("calib", "fp8kv_runtime")

# floors of the house, lowest first: a room (a direct child of `calib`) imports from floors below
FLOORS = (
    {"calib", "fp8kv_runtime", "choices", "errors", "progress"},
    {"arguments", "caches", "divergence", "doctor", "files", "strict_yaml"},
    {"recipe"},
    {"models", "scales"},
    {"data", "same_model"},
    {"verify"},
    {"export", "serving"},
    {"capture"},
    {"layerwise", "output"},
    {"rescale"},
    {"eval", "generate", "plan", "prepare", "rewrite"},
    {"bench", "job", "packs", "served"},
    {"commands"},
    {"__main__", "cli"},
)


def sources(root=ROOT):
    return [*(file for p in PACKAGES for file in (root / p).rglob("*.py")), *root.glob("cli.py")]


def imports(file, *, top_level_only=False):
    """Names that `file` imports; `from a import b` is both `a` and `a.b`."""
    tree = ast.parse(file.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph(root=ROOT):
    """Module -> the modules of ours that it imports anywhere: at the top, lazily, for types."""
    files = {_module(file, root): file for file in sources(root)}
    graph = {}
    for module, file in files.items():
        found = {name for name in imports(file) if name in files} - {module}
        # naming a submodule passes through its package, which is no import of what that holds
        graph[module] = {n for n in found if not any(o.startswith(f"{n}.") for o in found)}
    return graph


def _module(file, root):
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module):
    """`calib.models.load` is in the room `model`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "calib" and len(parts) > 1 else parts[0]


def room_graph(graph):
    rooms = {}
    for module, found in graph.items():
        rooms.setdefault(room(module), set()).update({room(n) for n in found} - {room(module)})
    return rooms


def circle(graph):
    """One circle of `graph`, or None."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def upward(rooms, floors=FLOORS):
    """Imports from a floor to the same or a higher one."""
    level = {name: number for number, floor in enumerate(floors) for name in floor}
    return [(a, b) for a, found in rooms.items() for b in found if level[b] >= level[a]]
