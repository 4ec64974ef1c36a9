"""Imports flow one way and in no circle, files stay small, `--help` is light."""

import ast
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("calib", "fp8kv_runtime", "recipes")

# floors of the house, lowest first: a room (a direct child of `calib`) imports from floors below
FLOORS = (
    {"fp8kv_runtime", "recipes", "choices", "errors", "progress"},
    {"atomic", "caches", "doctor", "strict_yaml", "text"},
    {"recipe", "scalefiles"},
    {"model", "scales", "verify"},
    {"data", "export", "serving"},
    {"marks"},
    {"measure", "output"},
    {"any_scales", "merge", "offload", "rescale"},
    {"eval", "generate", "plan", "prepare", "rewrite"},
    {"bench", "job", "packs", "served"},
    {"commands"},
    {"cli"},
)

# what a package must never import, not even lazily
FORBIDDEN = {
    "fp8kv_runtime": {"calib", "cli", "typer"},
    "calib": {"cli", "triton"},
    "calib/commands": {"cli", "fp8kv_runtime", "torch"},
    "calib/scalefiles": {"torch", "transformers"},
    "calib/verify": {"torch", "transformers"},
    "calib/serving": {"torch", "transformers"},
    "calib/export": {"transformers", "datasets"},
    "recipes": {"calib", "cli", "fp8kv_runtime", "torch"},
}


def sources(root=ROOT):
    return [*(file for p in PACKAGES for file in (root / p).rglob("*.py")), *root.glob("cli.py")]


SOURCES = sources()


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
    """`calib.model.load` is in the room `model`."""
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


def test_no_circle_between_files():
    assert circle(import_graph()) is None


def test_no_circle_between_rooms_and_no_import_of_a_higher_floor():
    rooms = room_graph(import_graph())
    assert circle(rooms) is None
    assert sorted(rooms.keys() - {"calib"}) == sorted(name for floor in FLOORS for name in floor)
    assert upward({a: found for a, found in rooms.items() if a != "calib"}) == []


@pytest.mark.parametrize(
    "lower",
    [
        "def f():\n    from calib.upper import g\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import calib.upper\n",
        "from calib import upper\n",
    ],
    ids=["lazy", "for types", "from the package"],
)
def test_the_tests_above_see_every_import(lower, tmp_path):
    (tmp_path / "calib").mkdir()
    (tmp_path / "calib" / "__init__.py").touch()
    (tmp_path / "calib" / "lower.py").write_text(lower)
    (tmp_path / "calib" / "upper.py").write_text("")
    graph = import_graph(tmp_path)
    assert circle(graph) is None
    assert upward(room_graph(graph), [{"lower"}, {"upper"}, {"calib"}]) == [("lower", "upper")]
    (tmp_path / "calib" / "upper.py").write_text("import calib.lower\n")
    assert set(circle(import_graph(tmp_path))) == {"calib.lower", "calib.upper"}


def test_the_top_of_calib_can_be_seen_at_a_glance():
    assert len([*(ROOT / "calib").glob("*.py")]) <= 16


def test_a_name_means_one_thing():
    stems = Counter(file.stem for file in SOURCES if "commands" not in file.parts)
    # errors and attention of each package
    shared = {"__init__", "attention", "errors"}
    assert {stem for stem, count in stems.items() if count > 1} <= shared


def roots(names):
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_leave_alone_what_is_not_theirs(package):
    for file in (ROOT / package).rglob("*.py"):
        assert not roots(imports(file)) & FORBIDDEN[package], file


def test_typer_is_for_commands_and_triton_for_kernels_and_transformers_for_the_bridge():
    for file in SOURCES:
        found = roots(imports(file))
        assert "typer" not in found or "commands" in file.parts or file.stem == "cli", file
        if "fp8kv_runtime" in file.parts:
            assert "triton" not in found or "kernels" in file.parts, file
            assert "transformers" not in found or "hf" in file.parts, file


def test_the_command_line_imports_nothing_heavy_before_a_command_runs():
    allowed = {"typer", "calib", *sys.stdlib_module_names}
    for file in (ROOT / "cli.py", *(ROOT / "calib" / "commands").glob("*.py")):
        assert roots(imports(file, top_level_only=True)) <= allowed, file


@pytest.mark.parametrize("module", ["cli", "calib", "calib.choices"])
def test_importing_is_light(module):
    code = f"import sys, {module}; print(*{{'torch', 'transformers', 'rich'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_calib_works_without_triton():
    code = "import sys; sys.modules['triton'] = None; import calib.job, fp8kv_runtime.hf"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["calib", "calib.data", "calib.export", "fp8kv_runtime"])
def test_public_names_exist(name):
    module = import_module(name)
    assert len(set(module.__all__)) == len(module.__all__) > 0
    assert all(hasattr(module, public) for public in module.__all__)
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


def test_only_commands_print():
    for file in SOURCES:
        calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
        printed = [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
        assert not printed or "commands" in file.parts, file


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_and_functions_stay_small(file):
    limit = 350 if "kernels" in file.parts else 250
    assert len(file.read_text().splitlines()) <= limit
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.end_lineno - node.body[0].lineno + 1
            names = map(ast.unparse, node.decorator_list)
            is_kernel = any(name.startswith("triton.jit") for name in names)
            assert body <= (120 if is_kernel else 40), f"{file.name}: {node.name} has {body} lines"
