"""The Python examples of the documentation run as they stand."""

import ast
import re
from pathlib import Path

import pytest
from command_line import calibrate, fp8kv

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLES = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in sorted(DOCS.glob("*.md"))
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example, tiny_directory, tmp_path, monkeypatch):
    assert calibrate(tiny_directory, "-o", tmp_path / "build/demo").exit_code == 0
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/model").symlink_to(tiny_directory)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "example", "exec"), {})


PLANS = re.findall(r"\$ fp8kv (plan .*)\n((?:.|\n)*?)(?=\n\$|```)", (DOCS / "scale.md").read_text())


@pytest.mark.parametrize(("command", "shown"), PLANS, ids=[command for command, _ in PLANS])
def test_a_plan_is_what_the_command_prints(command, shown, monkeypatch):
    monkeypatch.chdir(DOCS.parent)
    monkeypatch.setenv("COLUMNS", "110")
    printed = fp8kv(*command.split()).stdout
    assert [line.rstrip() for line in printed.splitlines()] == shown.rstrip().splitlines()


def test_there_are_plans():
    assert len(PLANS) == 3


def test_the_guide_lists_every_exit_status():
    guide = (DOCS / "guide.md").read_text().partition("## Exit status")[2].partition("\n## ")[0]
    listed = {int(status) for status in re.findall(r"^\| (\d+) \|", guide, re.MULTILINE)}
    assert listed == {0, *_statuses(DOCS.parent / "calib" / "commands")}


def _statuses(commands):
    """Numbers that `typer.Exit` or `_fail` is called with."""
    calls = (
        node
        for path in commands.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.Exit", "_fail")
    )
    last = [call.args[-1] for call in calls]
    return {number.value for number in last if isinstance(number, ast.Constant)}
