"""How many random mistakes in the shipped code the tests notice.

run_mutants.py                         the committed sample of mutants
run_mutants.py --room calib/scales --seed 7 --count 40 --tests tests/calib/scales
                                       another sample, of one room, against these tests

A mutant meets half a minute of tests: those that import its module or lie in the folder of its room. It is
killed by a test that fails with it and passes without it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from mutate import KINDS, Mutant, apply, find_mutants, sample

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
SEED, COUNT, SECONDS = 20261125, 150, 30  # seconds of the CPU, for one mutant
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
    parser.add_argument("--work", type=Path, default=ROOT / "build/mutants", help="scratch directory")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    options = parser.parse_args()
    mutants = [mutant for mutant in find_mutants(ROOT) if mutant.file.startswith(options.room)]
    print(table(run_all(sample(mutants, options.count, options.seed), options)))


def tests_of(mutant: Mutant) -> list[str]:
    """Return the test files of a mutant's module: those named after it, those that import it, its room's."""
    path = Path(mutant.file)
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    room, name = module.rpartition(".")[::2]
    imports = re.compile(rf"\b{re.escape(module)}\b|\bfrom {re.escape(room)} import .*\b{name}\b")
    folder = "tests/" + "/".join(path.parent.parts).replace("fp8kv_runtime", "runtime")
    files = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("tests/**/test_*.py"))
    files = [file for file in files if not file.startswith(WITHOUT)]
    importing = {file for file in files if imports.search((ROOT / file).read_text())}
    in_room = {file for file in files if file.startswith(folder.removesuffix("/kernels") + "/")}
    named = {file for file in importing | in_room if name.strip("_") in Path(file).stem}
    return sorted(importing | in_room, key=lambda file: (file not in named, file not in importing, file))


def run_all(mutants: list[Mutant], options: argparse.Namespace) -> list[dict[str, object]]:
    """Run the tests of each mutant, in as many copies of the tree as there are jobs."""
    context = get_context("spawn")
    trees = context.Queue()
    for job in range(options.jobs):
        trees.put(copy_tree(options.work / f"tree{job}"))
    rows = []
    tasks = [(mutant, options.tests or tests_of(mutant)) for mutant in mutants]
    with context.Pool(options.jobs, initializer=start_worker, initargs=(trees,)) as pool:
        for row in pool.imap_unordered(run_one, tasks):
            rows.append(row)
            (options.work / "result.json").write_text(json.dumps(rows, indent=1))
            place = f"{len(rows)}/{len(mutants)}"
            print(f"{place} {row['outcome']:9}{row['seconds']:6} s  {row['mutant']}", flush=True)
    return rows


def copy_tree(target: Path) -> Path:
    """Copy the tracked files of this checkout."""
    shutil.rmtree(target, ignore_errors=True)
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
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
    models = ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
    for name in ("datasets", "lm_eval", "pytest", "rich.progress", "torch", "triton", *models):
        import_module(name)


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
            said = (TREE / "output").read_text()
            if not failed and code in (0, 2, 5) and "no tests ran" not in said:
                break
            # a test that fails without the mutant too says nothing; nor does a run that cannot begin
            _, alone = forked(failed or ["--collect-only", *tests])
            if alone == 0:
                outcome = "killed"
                break
            assert failed, f"pytest cannot run {tests}:\n{said[-2000:]}"
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


def table(rows: list[dict[str, object]]) -> str:
    """Return the killed by kind, and what survived."""
    lines = []
    for kind in (*KINDS, None):
        part = [row for row in rows if kind in (row["kind"], None)]
        killed = sum(row["outcome"] == "killed" for row in part)
        lines.append(f"{kind or 'all':12} {killed:4} of {len(part):4}")
    return "\n".join([*lines, *(f"survived: {r['mutant']}" for r in rows if r["outcome"] == "survived")])


if __name__ == "__main__":
    main()
