"""How many random mistakes in the shipped code the tests notice.

run_mutants.py                         the committed sample of mutants
run_mutants.py --room calib/scales --seed 7 --count 40 --tests tests/calib/scales
                                       another sample, of one room, against these tests
run_mutants.py --compare OLD NEW       two results beside each other

A mutant meets half a minute of tests: those that run its line, where --coverage says which they are (data of
pytest-cov with --cov-branch --cov-context=test), else those that import its module or lie in the folder of
its room. It is killed by a test that fails with it and passes without it. The tests may be those of another
checkout.
"""

import argparse
import ast
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
import traceback
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from mutate import KINDS, Mutant, apply, find_mutants, sample

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
SEED, COUNT = 20261125, 150
SECONDS, MOST = 30, 60  # of the CPU, and test functions, for one mutant
# these look for the code as it is
WITHOUT = ("tests/runtime/test_mutations.py", "tests/test_architecture.py", "tests/ptx/", "tests/interop/")
# what is imported before pytest begins is not ours
PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "-p", "watch_tests")
PYTEST += ("-W", "ignore::pytest.PytestAssertRewriteWarning")


def main() -> None:
    """Run what the command line says."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--room", default="", help="take mutants of paths that begin so")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--tests", nargs="*", help="files or folders, instead of each mutant's own")
    parser.add_argument("--tests-of", type=Path, default=ROOT, help="a checkout whose tests are used")
    parser.add_argument("--coverage", type=Path, help="which test runs which line of these tests' checkout")
    parser.add_argument("--only", type=Path, help="a result: take only mutants that were killed there")
    parser.add_argument("--work", type=Path, default=ROOT / "build/mutants", help="scratch directory")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    options = parser.parse_args()
    if options.compare:
        print(compare(*(json.loads(path.read_text()) for path in options.compare)))
        return
    mutants = [mutant for mutant in find_mutants(ROOT) if mutant.file.startswith(options.room)]
    mutants = sample(mutants, options.count, options.seed)
    if options.only:
        rows = json.loads(options.only.read_text())
        killed = {row["mutant"] for row in rows if row["outcome"] == "killed"}
        mutants = [mutant for mutant in mutants if str(mutant) in killed]
    print(table(run_all(mutants, options)))


def tests_of(mutant: Mutant, tree: Path) -> list[str]:
    """Return the test files of a mutant's module: those named after it, those that import it, its room's."""
    path = Path(mutant.file)
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    room, name = module.rpartition(".")[::2]
    imports = re.compile(rf"\b{re.escape(module)}\b|\bfrom {re.escape(room)} import .*\b{name}\b")
    folder = "tests/" + "/".join(path.parent.parts).replace("fp8kv_runtime", "runtime")
    files = sorted(str(file.relative_to(tree)) for file in tree.glob("tests/**/test_*.py"))
    files = [file for file in files if not file.startswith(WITHOUT)]
    importing = {file for file in files if imports.search((tree / file).read_text())}
    in_room = {file for file in files if file.startswith(folder.removesuffix("/kernels") + "/")}
    named = {file for file in importing | in_room if name.strip("_") in Path(file).stem}
    return sorted(importing | in_room, key=lambda file: (file not in named, file not in importing, file))


def tests_running(mutant: Mutant, tree: Path, coverage: Path) -> list[str]:
    """Return tests that run a mutant's statement: those of its module first, of these the small ones first.

    A line that runs on import, or in a fixture that tests may share, belongs to all tests of its module.
    """
    from coverage import CoverageData

    data = CoverageData(str(coverage))
    data.read()
    [path] = [path for path in data.measured_files() if path.endswith(f"/{mutant.file}")]
    lines, of_module = statement_lines(ROOT / mutant.file, mutant.line), tests_of(mutant, tree)
    contexts = data.contexts_by_lineno(path)
    running = {context for line in lines for context in contexts.get(line, []) if context}
    size = sizes_of_tests(coverage)
    tests = sorted(
        {function_of(context) for context in running if context.endswith("|run")},
        key=lambda test: (test.partition("::")[0] not in of_module, size[test]),
    )
    tests = [test for test in tests if not test.startswith(WITHOUT)][:MOST]
    if not running or any(context.endswith("|setup") for context in running):
        # of a file that is given whole, pytest runs no function earlier
        tests = of_module + [test for test in tests if test.partition("::")[0] not in of_module]
    return tests


@cache
def sizes_of_tests(coverage: Path) -> dict[str, int]:
    """Return how many steps from line to line each test takes; it goes for the time that it takes."""
    sizes: dict[str, int] = {}
    query = "select context, count(*) from arc join context on context.id = context_id group by context_id"
    for context, count in sqlite3.connect(coverage).execute(query):
        sizes[function_of(context)] = sizes.get(function_of(context), 0) + count
    return sizes


def function_of(context: str) -> str:
    """Return a test function, of all its cases."""
    return context.partition("[")[0].partition("|")[0]


def statement_lines(path: Path, line: int) -> range:
    """Return the lines of the statement at `line`; of a compound one, those of its head."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)]
    node = max((node for node in nodes if node.lineno <= line <= node.end_lineno), key=lambda n: n.lineno)
    end = node.body[0].lineno - 1 if getattr(node, "body", None) else node.end_lineno
    return range(node.lineno, max(end, line) + 1)


def run_all(mutants: list[Mutant], options: argparse.Namespace) -> list[dict[str, object]]:
    """Run the tests of each mutant, in as many copies of the tree as there are jobs."""
    context = get_context("spawn")
    trees = context.Queue()
    for job in range(options.jobs):
        trees.put(copy_tree(options.work / f"tree{job}", options.tests_of))
    rows = []

    def tests(mutant: Mutant) -> list[str]:
        if options.coverage and not options.tests:
            return tests_running(mutant, options.tests_of, options.coverage)
        return options.tests or tests_of(mutant, options.tests_of)

    with context.Pool(options.jobs, initializer=start_worker, initargs=(trees,)) as pool:
        for row in pool.imap_unordered(run_one, ((mutant, tests(mutant)) for mutant in mutants)):
            rows.append(row)
            (options.work / "result.json").write_text(json.dumps(rows, indent=1))
            place = f"{len(rows)}/{len(mutants)}"
            print(f"{place} {row['outcome']:9}{row['seconds']:6} s  {row['mutant']}", flush=True)
    return rows


def copy_tree(target: Path, tests_of: Path) -> Path:
    """Copy the tracked files of the checkout with the tests, and the shipped code of this one."""
    shutil.rmtree(target, ignore_errors=True)
    for root, is_of_code in ((ROOT, True), (tests_of, False)):
        for name in subprocess.check_output(["git", "ls-files"], cwd=root, text=True).splitlines():
            if name.startswith(("calib/", "fp8kv_runtime/")) == is_of_code and (root / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, target / name)
    return target.resolve()


def start_worker(trees) -> None:
    """Import what takes long, once; every run is forked from here."""
    global TREE
    TREE = trees.get()
    os.environ |= {"FP8KV_FAILED": str(TREE / "failed"), "FP8KV_SECONDS": str(SECONDS)}
    os.environ |= {"PYTHONPATH": f"{TREE}:{HERE}", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    os.environ |= offline | {"TRITON_INTERPRET": "1", "COLUMNS": "200"}
    os.chdir(TREE)
    sys.path[:0] = [str(HERE), str(TREE)]
    import datasets  # noqa: F401
    import lm_eval  # noqa: F401
    import pytest  # noqa: F401
    import rich.progress  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401
    import triton  # noqa: F401


def run_one(task: tuple[Mutant, list[str]]) -> dict[str, object]:
    """Return what the tests say to one mutant."""
    mutant, tests = task
    path, start, unreliable = TREE / mutant.file, time.time(), []
    outcome, failed, code = "survived", [], 0
    source = path.read_text()
    try:
        while tests:
            path.write_text(apply(source, mutant))
            failed, code = forked([*tests, *(f"--deselect={test}" for test in unreliable)])
            path.write_text(source)
            if not failed and code in (0, 2, 5) and "no tests ran" not in output():
                break
            # a test that fails without the mutant too says nothing; nor does a run that cannot begin
            _, alone = forked(failed or ["--collect-only", *tests])
            if alone == 0:
                outcome = "killed"
                break
            assert failed, f"pytest cannot run {tests}:\n{output()[-2000:]}"
            unreliable += failed
    finally:
        path.write_text(source)
    cause = (failed or [f"exit status {code}"])[0] if outcome == "killed" else ""
    return {
        "mutant": str(mutant), "kind": mutant.kind, "outcome": outcome, "by": cause,
        "seconds": round(time.time() - start, 1), "unreliable": unreliable,
    }  # fmt: skip


def forked(arguments: list[str]) -> tuple[list[str], int]:
    """Run pytest in a fork of this process; return the tests that failed, and the exit status."""
    (TREE / "failed").write_text("")
    pid = os.fork()
    if pid == 0:
        with (TREE / "output").open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        import pytest

        sys.stdout, sys.stderr, code = sys.__stdout__, sys.__stderr__, 99
        try:
            code = int(pytest.main([*PYTEST, *arguments]))
        finally:
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return (TREE / "failed").read_text().splitlines(), os.waitstatus_to_exitcode(status)


def output() -> str:
    """Return what the last run printed."""
    return (TREE / "output").read_text()


def table(rows: list[dict[str, object]]) -> str:
    """Return the killed by kind, and what survived."""
    lines = []
    for kind in (*KINDS, None):
        part = [row for row in rows if kind in (row["kind"], None)]
        killed = sum(row["outcome"] == "killed" for row in part)
        lines.append(f"{kind or 'all':12} {killed:4} of {len(part):4}")
    return "\n".join([*lines, *(f"survived: {r['mutant']}" for r in rows if r["outcome"] == "survived")])


def compare(old: list[dict[str, object]], new: list[dict[str, object]]) -> str:
    """Return how many of the mutants that the old tests kill the new ones kill too, by kind."""
    outcomes = {row["mutant"]: row["outcome"] for row in new}
    lines = [f"{'':12} mutants, killed by the old, of these by the new"]
    for kind in (*KINDS, None):
        part = [row for row in old if kind in (row["kind"], None)]
        killed = [row for row in part if row["outcome"] == "killed"]
        both = sum(outcomes.get(row["mutant"]) == "killed" for row in killed)
        lines.append(f"{kind or 'all':12} {len(part):7} {len(killed):18} {both:19}")
    lost = [row["mutant"] for row in old if row["outcome"] == "killed"]
    lost = [name for name in lost if outcomes.get(name) != "killed"]
    return "\n".join([*lines, *(f"no longer killed: {name}" for name in lost)])


if __name__ == "__main__":
    main()
