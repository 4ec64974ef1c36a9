"""What the documentation lists is all there is."""

import ast
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
MAKEFILE = DOCS.parent / "Makefile"


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


def test_the_first_screen_of_the_readme_shows_the_two_commands():
    readme = (DOCS.parent / "README.md").read_text()
    first_screen = "\n".join(readme.splitlines()[:24])
    block = re.search(r"```bash\n(.*?)```", first_screen, re.DOTALL)
    commands = [line.partition("#")[0].strip() for line in block[1].splitlines()]
    assert commands == ["make demo", "make test"]
    targets = re.findall(r"^([a-z-]+): \$\(VENV\)/\.installed", MAKEFILE.read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)  # each installs first


def test_the_readme_runs_what_make_demo_runs():
    rule = MAKEFILE.read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    words = rule.replace("\\\n", " ").partition("fp8kv-calibrate ")[2].split()
    words.remove("--overwrite")
    command = "fp8kv-calibrate " + " ".join(words).replace("--output", "-o")
    for page in ("README.md", "docs/install.md", "Dockerfile"):
        assert command in (DOCS.parent / page).read_text(), page


def test_the_map_of_the_code_names_files_that_exist():
    named = re.findall(
        r"`((?:calib|fp8kv_runtime|tests|tools|recipes|examples|benchmarks)/[\w./-]*)`",
        (DOCS / "code.md").read_text(),
    )
    assert len(named) > 40
    assert [path for path in named if not (DOCS.parent / path).exists() and "ENGINE" not in path] == []
