"""Imports flow one way, public names are what they say, files stay small, `--help` is light."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("calib", "commands", "fp8kv_runtime", "recipes")
SOURCES = [*(file for p in PACKAGES for file in (ROOT / p).rglob("*.py")), ROOT / "cli.py"]

FORBIDDEN = {
    "fp8kv_runtime": {"calib", "cli", "commands", "typer"},
    "calib": {"cli", "commands", "typer", "triton"},
    "commands": {"cli", "fp8kv_runtime", "torch"},
    "calib/export": {"transformers", "datasets"},
    "recipes": {"calib", "cli", "fp8kv_runtime", "torch"},
}


def imports(file, *, top_level_only=False):
    tree = ast.parse(file.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def roots(names):
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_flow_downward(package):
    for file in (ROOT / package).rglob("*.py"):
        assert not roots(imports(file)) & FORBIDDEN[package], file


def test_triton_is_imported_by_kernels_only_and_transformers_by_the_bridge_only():
    for file in (ROOT / "fp8kv_runtime").rglob("*.py"):
        found = roots(imports(file))
        assert "triton" not in found or "kernels" in file.parts, file
        assert "transformers" not in found or "hf" in file.parts, file


def test_the_command_line_imports_nothing_heavy_before_a_command_runs():
    allowed = {"typer", "calib", "commands", *sys.stdlib_module_names}
    for file in (ROOT / "cli.py", *(ROOT / "commands").glob("*.py")):
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


def test_only_the_command_line_prints():
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
