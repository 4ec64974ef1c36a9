"""What the documentation lists is all there is, and what it says of an installation is true."""

import ast
import json
import re
from pathlib import Path

import dependencies
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
INSTALL = (DOCS / "install.md").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
_BASE = PROJECT.partition("\ndependencies = [")[2].partition("\n]")[0]
INSTALLS = json.loads((ROOT / "tests/install/installs.json").read_text())["installs"]
BASE = [Requirement(each) for each in re.findall(r'^    "(.+?)",', _BASE, re.MULTILINE)]


def test_the_guide_lists_every_exit_status():
    guide = (DOCS / "guide.md").read_text().partition("## Exit status")[2].partition("\n## ")[0]
    listed = {int(status) for status in re.findall(r"^\| (\d+) \|", guide, re.MULTILINE)}
    calls = (
        node
        for path in (ROOT / "calib" / "commands").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.Exit", "_fail")
    )
    last = [call.args[-1] for call in calls]
    assert listed == {0, *(number.value for number in last if isinstance(number, ast.Constant))}


def test_the_first_screen_of_the_readme_shows_the_two_commands():
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:24])
    assert commands(first_screen) == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+): \$\(VENV\)/\.installed", makefile, re.MULTILINE)
    assert {"demo", "test"} <= set(targets)  # each installs first


def test_the_readme_runs_what_make_demo_runs():
    rule = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    words = rule.replace("\\\n", " ").partition("fp8kv-calibrate ")[2].split()
    words.remove("--overwrite")
    command = "fp8kv-calibrate " + " ".join(words).replace("--output", "-o")
    for page in ("README.md", "docs/install.md", "Dockerfile"):
        assert command in (ROOT / page).read_text(), page


def test_the_map_of_the_code_names_files_that_exist():
    named = re.findall(
        r"`((?:calib|fp8kv_runtime|tests|tools|recipes|examples|benchmarks)/[\w./-]*)`",
        (DOCS / "code.md").read_text(),
    )
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists() and "ENGINE" not in path] == []


def commands(text):
    """Commands of its ```bash blocks, without their comments."""
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines()
    return [re.sub(r"\s+# .*", "", line) for line in lines if line.strip()]


def test_the_dockerfile_runs_the_commands_of_the_readme_in_their_order():
    steps = re.findall(r"^RUN (.+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    cpu_torch, *others = steps
    assert cpu_torch in commands(INSTALL)
    shown = commands((ROOT / "README.md").read_text())
    places = [shown.index(step) for step in others]
    assert len(places) >= 4
    assert places == sorted(places)


def test_the_page_shows_the_installs_that_passed_and_what_each_dependency_costs():
    assert table() in INSTALL, f"put this into docs/install.md:\n{table()}"
    assert all(row["passed"] for row in INSTALLS)
    weighed = json.loads(dependencies.RESULTS.read_text())
    assert dependencies.table(weighed) in INSTALL
    base = {row["name"] for row in weighed["rows"] if not row["extra"]}
    assert base == {dependencies.normal(each.name) for each in BASE}


def table():
    """The versions that were installed, and passed."""
    shown = ("torch", "transformers", "datasets", "accelerate", "numpy", "pydantic", "typer")
    words = {"lowest-direct": "oldest", "highest": "newest"}
    lines = [f"| Python | versions | {' | '.join(shown)} |", "|---" * (len(shown) + 2) + "|"]
    for row in INSTALLS:
        versions = " | ".join(row["versions"][name] for name in shown)
        lines.append(f"| {row['python']} | {words[row['resolution']]} | {versions} |")
    return "\n".join(lines)


def test_the_oldest_versions_allowed_and_every_python_that_is_named_passed():
    oldest = [row["versions"] for row in INSTALLS if row["resolution"] == "lowest-direct"]
    for requirement in BASE:
        (lowest,) = (Version(s.version) for s in requirement.specifier if s.operator == ">=")
        name = dependencies.normal(requirement.name)
        passed = [Version(versions[name]) for versions in oldest]
        assert Version(min(passed).public) == lowest, name
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)
    assert set(named) == {row["python"].rpartition(".")[0] for row in INSTALLS}
    assert f'requires-python = ">={named[0]}"' in PROJECT


def test_a_commit_runs_what_ci_runs_and_an_installation_tests_that_are_there():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repository["hooks"]
    assert hook["entry"] in (ROOT / ".ci" / "run").read_text().splitlines()
    source = (ROOT / "tests/install/installed_checks.py").read_text()
    files = re.findall(r'"(tests/[^"]+\.py)"', source)
    assert len(files) >= 4
    assert [file for file in files if not (ROOT / file).exists()] == []
