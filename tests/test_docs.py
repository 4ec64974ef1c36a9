"""What the documentation lists is all there is."""

import ast
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


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
