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
    heavy = {*("torch", "transformers", "pydantic", "numpy", "jinja2", "safetensors", "datasets")}
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


# what an import could change: nothing of the process, of the interpreter, of torch or of transformers
IMPORTS = """
import importlib, logging, os, pkgutil, signal, sys, threading, warnings
import matplotlib.figure, torch, typer
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

def state():
    yield from (dict(os.environ), os.getcwd(), os.umask(0o077), threading.enumerate())
    yield from ({x: signal.getsignal(x) for x in signal.valid_signals()}, sys.getrecursionlimit())
    yield from (sys.path[:], sys.meta_path[:], sys.path_hooks[:], sys.stdin, sys.stdout, sys.stderr)
    yield from (sys.excepthook, threading.excepthook, warnings.filters[:], warnings.showwarning)
    loggers = [logging.root, *map(logging.getLogger, [*logging.root.manager.loggerDict])]
    yield logging.root.level, logging.root.manager.disable
    yield {x.name: x.handlers[:] for x in loggers if x.handlers}
    yield from (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled())
    yield from (torch.get_num_threads(), torch.get_rng_state().tolist(), torch.cuda.is_initialized())
    yield from (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
    yield torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32, torch.nn.Module.__call__
    yield [dict(kind._global_mapping) for kind in (AttentionInterface, AttentionMaskInterface)]

os.umask(0o077)
before = [*state()]
for package in map(importlib.import_module, ("cli", "calib", "fp8kv_runtime")):
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"{package.__name__}."):
        module.name.endswith("__main__") or importlib.import_module(module.name)
for old, new in zip(before, state(), strict=True):
    assert old == new, (old, new)
"""


def test_importing_any_module_changes_nothing_else():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own = {"TORCHINDUCTOR_CACHE_DIR": str(ROOT)}  # torch names one where there is none
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=environment | own)


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


def test_no_text_or_list_is_multiplied_by_a_condition():
    """`"text" if condition else ""` is read aloud; `"text" * condition` is a riddle."""
    texts, conditions = (ast.JoinedStr, ast.List, ast.Tuple), (ast.Compare, ast.BoolOp, ast.UnaryOp)
    for file in [*sources(), *(ROOT / "tools").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                sides = (node.left, node.right)
                is_text = any(
                    isinstance(x, texts) or (isinstance(x, ast.Constant) and isinstance(x.value, str))
                    for x in sides
                )
                names = [ast.unparse(x).partition("(")[0].rpartition(".")[2] for x in sides]
                is_condition = any(isinstance(x, conditions) for x in sides) or any(
                    name.startswith(("is_", "has_")) or name in ("bool", "any", "all") for name in names
                )
                assert not (is_text and is_condition), f"{file}:{node.lineno}: {ast.unparse(node)}"
