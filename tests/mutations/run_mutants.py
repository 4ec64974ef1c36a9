"""How many random mistakes in the shipped code the tests notice.

run_mutants.py                         the committed sample, against all tests that come by each
run_mutants.py --room calib/scales --seed 7 --count 40 --tests tests/calib/scales
                                       another sample, of one room, against its tests
run_mutants.py --compare OLD NEW       two results beside each other

The tests may be of another checkout (`--tests-of`). A mutant is killed by a test that fails with it and
passes without it, or by a run that takes far longer than it takes without it.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from multiprocessing import get_context
from pathlib import Path

from mutate import KINDS, Mutant, apply, enclosing_function, find_mutants, sample

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SEED, COUNT = 20261125, 150
SECONDS_OF_TESTS = 90  # of the tests that come by one mutant, at most
CRASHED = 99
PYTEST = ("-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "fp8kv_probe", "-p", "no:randomly")
# what is imported before pytest begins is not ours
PYTEST += ("-W", "ignore::pytest.PytestAssertRewriteWarning")


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--room", default="", help="take mutants of paths that begin so")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--tests", nargs="*", help="these, instead of all tests that come by a mutant")
    parser.add_argument("--tests-of", type=Path, default=ROOT, help="a checkout whose tests are used")
    parser.add_argument("--only", type=Path, help="a result: take only mutants that were killed there")
    parser.add_argument("--work", type=Path, default=ROOT / "build/mutants", help="scratch directory")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    options = parser.parse_args()
    if options.compare:
        print(compare(*(json.loads(path.read_text()) for path in options.compare)))
        return
    mutants = sample(
        [m for m in find_mutants(ROOT) if m.file.startswith(options.room)], options.count, options.seed
    )
    options.work.mkdir(parents=True, exist_ok=True)
    if options.tests:
        chosen = dict.fromkeys(range(len(mutants)), options.tests)
        seconds = dict.fromkeys(chosen, 300.0)
    else:
        chosen, seconds = tests_of_mutants(mutants, options)
    numbers = list(range(len(mutants)))
    if options.only:
        killed = {row["mutant"] for row in json.loads(options.only.read_text()) if row["outcome"] == "killed"}
        numbers = [i for i in numbers if str(mutants[i]) in killed]
    rows = run_all(mutants, numbers, chosen, seconds, options)
    (options.work / "result.json").write_text(json.dumps(rows, indent=1))
    print(table(rows))


def tests_of_mutants(
    mutants: list[Mutant], options: argparse.Namespace
) -> tuple[dict[int, list[str]], dict[int, float]]:
    """Run all tests once on code that notes who comes by; return the tests of each mutant, and seconds."""
    tree, notes = options.work / "probed", options.work / "notes"
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir(parents=True)
    copy_tree(tree, options.tests_of)
    for file in {m.file for m in mutants}:
        probe_file(tree / file, [(i, m) for i, m in enumerate(mutants) if m.file == file])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "fp8kv_probe", "-p", "no:cacheprovider"]
    xdist = ["--numprocesses", str(options.jobs), "--dist", "worksteal"]
    with (options.work / "probed.txt").open("w") as output:
        subprocess.run(
            [*command, *xdist], cwd=tree, env=environment(tree, notes), stdout=output, stderr=output
        )
    durations: dict[str, float] = defaultdict(float)
    for line in read_notes(notes, "durations"):
        test, took = line.split("\t")
        durations[test] += float(took)
    failed = set(read_notes(notes, "failed"))
    hits: dict[int, set[str]] = defaultdict(set)
    for line in read_notes(notes, "hits"):
        number, test = line.split("\t")
        hits[int(number)].add(test)
    chosen, seconds = {}, {}
    for i, mutant in enumerate(mutants):
        tests = selected(mutant, hits[i], durations) - failed
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in tests:
            by_file[test.partition("::")[0]].append(test)
        order = sorted(by_file, key=lambda file: sum(durations[test] for test in by_file[file]))
        total, chosen[i] = 0.0, []
        for test in (test for file in order for test in sorted(by_file[file])):
            if total < SECONDS_OF_TESTS:
                chosen[i].append(test)
                total += durations[test]
        seconds[i] = total
    return chosen, seconds


def selected(mutant: Mutant, hits: set[str], durations: dict[str, float]) -> set[str]:
    """Return the tests that came by; of what ran in a fixture or at import, all of the file or the room."""
    tests = set()
    for name in hits:
        test, _, phase = name.rpartition(" ")
        if phase == "(setup)":
            file = test.partition("::")[0]
            tests |= {t for t in durations if t.startswith(file + "::")}
        elif test in durations:
            tests.add(test)
    if not tests or "" in hits:
        room, *inner = Path(mutant.file).parent.parts
        place = "/".join(["tests", "runtime" if room == "fp8kv_runtime" else "calib", *inner])
        tests |= {t for t in durations if t.startswith(place if inner != ["kernels"] else "tests/runtime")}
    return tests


def probe_file(path: Path, mutants: list[tuple[int, Mutant]]) -> None:
    """Put a probe at the head of each function that a mutant is in, unless Triton compiles it."""
    source = path.read_text()
    lines = source.split("\n")
    probes: dict[int, list[int]] = defaultdict(list)
    for i, mutant in mutants:
        function = enclosing_function(source, mutant)
        if function and not any("jit" in line for line in lines[function.lineno - 4 : function.lineno]):
            first = function.body[0]
            probes[first.lineno].append(i)
    for number in sorted(probes, reverse=True):
        line = lines[number - 1]
        calls = "; ".join(f"__import__('fp8kv_probe').hit({i})" for i in probes[number])
        if line.strip().startswith(('"""', 'r"""')):
            # before a docstring a call is harmless, but for who reads the docstring
            calls = f"{calls}; "
            lines[number - 1] = line[: len(line) - len(line.lstrip())] + calls + line.lstrip()
        else:
            lines.insert(number - 1, line[: len(line) - len(line.lstrip())] + calls)
    path.write_text("\n".join(lines))


def run_all(
    mutants: list[Mutant],
    numbers: list[int],
    chosen: dict[int, list[str]],
    seconds: dict[int, float],
    options: argparse.Namespace,
) -> list[dict[str, object]]:
    """Run the tests of each mutant, in as many copies of the tree as there are jobs."""
    for job in range(options.jobs):
        copy_tree(options.work / f"tree{job}", options.tests_of)
    context = get_context("spawn")
    names = context.Queue()
    for job in range(options.jobs):
        names.put(job)
    rows = []
    with context.Pool(options.jobs, initializer=start_worker, initargs=(names, options.work)) as pool:
        tasks = [(mutants[i], chosen[i], seconds[i]) for i in numbers]
        for row in pool.imap_unordered(run_one, tasks):
            rows.append(row)
            print(
                f"{len(rows)}/{len(numbers)} {row['outcome']:9} {row['seconds']:6} s  {row['mutant']}",
                flush=True,
            )
    return sorted(rows, key=lambda row: str(row["mutant"]))


def start_worker(names, work: Path) -> None:
    """Import what takes long, once; every run is forked from here."""
    global TREE, NOTES
    job = names.get()
    TREE, NOTES = work / f"tree{job}", work / f"notes{job}"
    NOTES.mkdir(exist_ok=True)
    os.environ.update(environment(TREE, NOTES))
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


def run_one(task: tuple[Mutant, list[str], float]) -> dict[str, object]:
    """Return what the tests say to one mutant."""
    mutant, tests, seconds = task
    path = TREE / mutant.file
    source, start = path.read_text(), time.time()
    path.write_text(apply(source, mutant))
    unreliable: list[str] = []
    try:
        while True:
            failed, code = forked([*tests, *without(unreliable)], 60 + 4 * seconds)
            if code in (0, 5):
                outcome = "survived"
                break
            # a test that fails without the mutant too says nothing; nor does a run that cannot begin
            path.write_text(source)
            _, alone = forked(failed or ["--collect-only", *tests], 300)
            outcome = "killed"
            if alone == 0:
                break
            assert failed, f"pytest cannot run {tests}:\n{(NOTES / 'output').read_text()[-2000:]}"
            unreliable += failed
            path.write_text(apply(source, mutant))
    finally:
        path.write_text(source)
    cause = (failed or [f"exit status {code}"])[0] if outcome == "killed" else ""
    return {
        "mutant": str(mutant), "kind": mutant.kind, "outcome": outcome, "by": cause, "tests": len(tests),
        "seconds": round(time.time() - start, 1), "unreliable": unreliable,
    }  # fmt: skip


def without(tests: list[str]) -> list[str]:
    """Return pytest's arguments that leave these tests out."""
    return [f"--deselect={test}" for test in tests]


def forked(tests: list[str], limit: float) -> tuple[list[str], int]:
    """Run tests in a fork of this process; return those that failed, and the exit status of pytest."""
    for path in NOTES.iterdir():
        path.unlink()
    if not tests:
        return [], 5
    pid = os.fork()
    if pid == 0:
        os.setsid()
        output = os.open(NOTES / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        code = CRASHED
        try:
            code = int(pytest.main([*PYTEST, *tests]))
        finally:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.time() + limit
    while time.time() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return read_notes(NOTES, "failed"), os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return [], 124


def environment(tree: Path, notes: Path) -> dict[str, str]:
    """Return the variables that tests of a copied tree run with."""
    return {
        **os.environ,
        "PYTHONPATH": f"{tree}:{HERE}",
        "FP8KV_PROBE": str(notes),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRITON_INTERPRET": "1",
        "COLUMNS": "200",
    }


def copy_tree(target: Path, tests_of: Path) -> None:
    """Copy the tracked files of this checkout, with the tests of another."""
    shutil.rmtree(target, ignore_errors=True)
    for root, inner in ((ROOT, False), (tests_of, True)):
        for name in subprocess.check_output(["git", "ls-files"], cwd=root, text=True).splitlines():
            if name.startswith("tests/") == inner and (root / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, target / name)


def read_notes(directory: Path, kind: str) -> list[str]:
    """Return the lines that all processes noted."""
    return [line for path in directory.glob(f"{kind}.*") for line in path.read_text().splitlines()]


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
