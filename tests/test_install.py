"""What README, docs/install.md, Dockerfile and pyproject.toml say of an installation is true."""

import json
import re
from pathlib import Path

import dependencies
import pytest
import yaml
from install_table import installs, table
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "install.md").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
_BASE = PROJECT.partition("\ndependencies = [")[2].partition("\n]")[0]
BASE = re.findall(r'^    "(.+?)",', _BASE, re.MULTILINE)


def commands(text):
    """Commands of its ```bash blocks, without their comments."""
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines()
    return [re.sub(r"\s+# .*", "", line) for line in lines if line.strip()]


def test_the_dockerfile_runs_the_commands_of_the_readme_in_their_order():
    steps = re.findall(r"^RUN (.+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    cpu_torch, *others = steps
    assert cpu_torch in commands(PAGE)
    shown = commands((ROOT / "README.md").read_text())
    places = [shown.index(step) for step in others]
    assert len(places) >= 4
    assert places == sorted(places)


def test_the_page_shows_the_installs_that_passed():
    assert table() in PAGE, f"put this into docs/install.md:\n{table()}"
    assert all(row["passed"] for row in installs())


def test_the_page_shows_what_each_dependency_costs():
    assert dependencies.table(json.loads(dependencies.RESULTS.read_text())) in PAGE


def test_the_base_is_what_was_weighed():
    rows = json.loads(dependencies.RESULTS.read_text())["rows"]
    weighed = {row["name"] for row in rows if not row["extra"]}
    assert weighed == {dependencies.normal(Requirement(each).name) for each in BASE}


@pytest.mark.parametrize("given", BASE)
def test_the_oldest_version_allowed_is_one_that_passed(given):
    requirement = Requirement(given)
    (lowest,) = (Version(s.version) for s in requirement.specifier if s.operator == ">=")
    name = dependencies.normal(requirement.name)
    oldest = [row["versions"] for row in installs() if row["resolution"] == "lowest-direct"]
    passed = [Version(versions[name]) for versions in oldest]
    assert Version(min(passed).public) == lowest


def test_every_python_that_is_named_was_installed_on():
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)
    ran = {row["python"].rpartition(".")[0] for row in installs()}
    assert set(named) == ran
    assert f'requires-python = ">={named[0]}"' in PROJECT


def test_a_commit_runs_what_ci_runs():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repository["hooks"]
    assert hook["entry"] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_tests_that_an_installation_runs_are_there():
    source = (ROOT / "tests/install/installed_checks.py").read_text()
    files = re.findall(r'"(tests/[^"]+\.py)"', source)
    assert len(files) >= 4
    assert [file for file in files if not (ROOT / file).exists()] == []
