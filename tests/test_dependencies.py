"""Packages that the shipped code imports are declared, each by itself; the base needs no extra."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from command_line import SMALL, fp8kv, one_line_error

ROOT = Path(__file__).parent.parent
SHIPPED = ("calib", "fp8kv_runtime")
# imported only inside them, by the plugin that they load
ENGINES = {"vllm", "sglang"}
# what huggingface_hub before version 2 requires, where it is called so
BY_THE_HUB = {"httpx"}


@pytest.fixture(scope="module")
def imported():
    """Third-party packages, by the names of their distributions."""
    files = [f for name in SHIPPED for f in (ROOT / name).rglob("*.py")]
    names = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    found = packages_distributions()
    others = names - set(sys.stdlib_module_names) - {*SHIPPED, *ENGINES, *BY_THE_HUB}
    return {found[name][0].lower().replace("_", "-") for name in others}


def declared(text):
    """Dependencies, and those of the extras."""
    return {name.lower().replace("_", "-") for name in re.findall(r'"([\w-]+)>=', text)}


def test_what_is_imported_is_declared_and_what_is_not_declared_is_noticed(imported):
    text = (ROOT / "pyproject.toml").read_text()
    text = text[text.index("dependencies = [") : text.index("\ndev = ")]
    assert imported <= declared(text)
    for name in ("numpy", "pyarrow", "lm-eval", "PyYAML"):
        without = re.sub(rf'"{name}>=', '"', text, flags=re.IGNORECASE)
        assert imported - declared(without) == {name.lower()}


def test_jobs_and_evaluations_need_neither_an_extra_nor_triton():
    code = (
        "import sys; sys.modules |= dict.fromkeys(('matplotlib', 'lm_eval', 'gguf', 'triton'))\n"
        "import calib.job, calib.evaluate.run, calib.scales.plot, calib.commands.app, fp8kv_runtime.hf"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_draws_names_its_extra_at_once(tiny_directory, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert fp8kv("calibrate", tiny_directory, *SMALL, "-o", out).exit_code == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for arguments in (
        ("inspect", out, "--plot", "scales.png"),
        ("eval", tiny_directory, "-o", tmp_path / "report"),
        ("calibrate", tiny_directory, *SMALL, "--evaluate", "-o", tmp_path / "new"),
    ):
        one_line_error(fp8kv(*arguments), "needs matplotlib: pip install 'fp8kv[report]'")
        assert {path.name for path in tmp_path.iterdir()} == {"out", "tiny-llama"}
