"""Names are plain, files and functions small, `--help` is light; `make check` asks for the contracts."""

import ast
import os
import subprocess
import sys

from house import ROOT, room_graph, sources, top_level_imports
from house_picture import PICTURES, draw, needed_edges
from plain_words import class_homes, offences, shape_offences


def test_the_pictures_of_the_house_are_fresh_and_leave_out_what_a_longer_way_explains():
    for picture, kind in PICTURES.items():
        assert picture.read_text() == draw(room_graph(), kind), f"{picture.name}: run `make pages`"
    assert needed_edges({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == [("a", "b"), ("b", "c")]


def test_the_command_line_imports_nothing_heavy_and_scales_are_read_and_verified_without_torch():
    light = {"typer", "calib", *sys.stdlib_module_names}
    heavy = {*("torch", "transformers", "yaml", "pydantic", "numpy", "jinja2", "safetensors", "datasets")}
    heavy |= {"triton", "packaging", "accelerate", "huggingface_hub", "matplotlib"}
    for file in (ROOT / "calib" / "commands").glob("*.py"):
        assert set(top_level_imports(file)) <= light, file
    code = (
        "import sys, cli, calib.commands.app, calib, calib.choices\n"
        "assert 'rich' not in sys.modules\n"
        "try: cli.main(['--help'])\n"
        f"except SystemExit: assert not {heavy} & set(sys.modules)\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import calib.files.model_directory, calib.files.stored_scales, calib.engines.verification\n"
        "from calib.commands import inspect\n"
        "try: inspect._read(__import__('pathlib').Path('/nowhere'))\n"
        "except ValueError: pass\n"
        "cli.main(['calibrate', '--help'])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_importing_any_module_leaves_the_environment_as_it_is():
    code = (
        "import importlib, os, pkgutil, calib, cli, fp8kv_runtime, torch\n"
        "before = dict(os.environ)\n"
        "for package in (calib, fp8kv_runtime):\n"
        "    for module in pkgutil.walk_packages(package.__path__, f'{package.__name__}.'):\n"
        "        module.name.endswith('__main__') or importlib.import_module(module.name)\n"
        "assert before == dict(os.environ)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own = {"TORCHINDUCTOR_CACHE_DIR": str(ROOT)}  # torch names one where there is none
    subprocess.run([sys.executable, "-c", code], check=True, env=environment | own)


def test_files_and_functions_stay_small_and_short_files_have_a_reason():
    for file in sources():
        lines = len(file.read_text().splitlines())
        assert lines <= 450, file
        is_entry = file.name in ("__init__.py", "__main__.py", "cli.py")
        assert lines >= 60 or is_entry or "of its own" in ast.get_docstring(ast.parse(file.read_text())), file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.end_lineno - node.body[0].lineno + 1
                is_kernel = any(ast.unparse(name).startswith("triton.jit") for name in node.decorator_list)
                assert body <= (120 if is_kernel else 40), f"{file}: {node.name} has {body} lines"


def test_names_and_docstrings_are_plain():
    assert [f"{file}:{line}: {text}" for file in sources() for line, text in offences(file)] == []
    assert {name: files for name, files in class_homes(sources()).items() if len(files) > 1} == {}


def test_tensors_have_shapes_in_letters_that_are_explained():
    files = [*sources(), *(ROOT / "tools").rglob("*.py")]
    assert [f"{file}:{line}: {text}" for file in files for line, text in shape_offences(file)] == []


def test_only_one_place_writes_json():
    """`json.dumps` writes NaN, which no other reader takes."""
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump", "dumps"):
                assert "allow_nan=False" in ast.unparse(node), file
