"""Imports flow one way and in no circle, files stay small, `--help` is light."""

import ast
import subprocess
import sys
from importlib import import_module

import pytest
from house import FLOORS, ROOT, circle, import_graph, imports, room_graph, sources, upward
from house_picture import PICTURES, draw, needed_edges

# what a package must never import, not even lazily
FORBIDDEN = {
    "fp8kv_runtime": {"calib", "cli", "typer"},
    "calib": {"cli", "triton"},
    "calib/commands": {"cli", "fp8kv_runtime", "torch"},
    "calib/files": {"transformers"},
    "calib/verify": {"torch", "transformers"},
    "calib/serving": {"torch", "transformers"},
    "calib/export": {"transformers", "datasets"},
}


SOURCES = sources()


def test_no_circle_between_files():
    assert circle(import_graph()) is None


def test_no_circle_between_rooms_and_no_import_of_a_higher_floor():
    rooms = room_graph(import_graph())
    assert circle(rooms) is None
    assert sorted(rooms) == sorted(name for floor in FLOORS for name in floor)
    assert upward(rooms) == []


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


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_the_picture_of_the_house_is_fresh(picture):
    drawn = draw(room_graph(import_graph()), PICTURES[picture])
    assert picture.read_text() == drawn, "run `make house`"


def test_the_picture_leaves_out_what_a_longer_way_explains():
    rooms = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert needed_edges(rooms) == [("a", "b"), ("b", "c")]


def roots(names):
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_leave_alone_what_is_not_theirs(package):
    for file in (ROOT / package).rglob("*.py"):
        assert not roots(imports(file)) & FORBIDDEN[package], file


def test_typer_is_for_commands_and_triton_for_kernels_and_transformers_for_the_bridge():
    for file in SOURCES:
        found = roots(imports(file))
        assert "typer" not in found or "commands" in file.parts, file
        if "fp8kv_runtime" in file.parts:
            assert "triton" not in found or "kernels" in file.parts, file
            assert "transformers" not in found or "hf" in file.parts, file


def test_the_command_line_imports_nothing_heavy_before_a_command_runs():
    allowed = {"typer", "calib", *sys.stdlib_module_names}
    for file in (ROOT / "calib" / "commands").glob("*.py"):
        assert roots(imports(file, top_level_only=True)) <= allowed, file


@pytest.mark.parametrize("module", ["cli", "calib.commands.app", "calib", "calib.choices"])
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


def test_files_and_functions_stay_small():
    for file in SOURCES:
        assert len(file.read_text().splitlines()) <= 450, file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.end_lineno - node.body[0].lineno + 1
                names = map(ast.unparse, node.decorator_list)
                is_kernel = any(name.startswith("triton.jit") for name in names)
                assert body <= (120 if is_kernel else 40), f"{file}: {node.name} has {body} lines"
