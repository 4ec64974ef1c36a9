"""Everything that waits for a GPU, one step after the other; nobody need watch (`make gpu`).

    python benchmarks/gpu_queue.py [--dry-run] [--minutes N] [--again STEP ...] [--output build/gpu]

benchmarks/gpu_queue.yaml lists the steps. Each ends within its limit and leaves OUTPUT/STEP/log.txt and
result.json; OUTPUT/README.md is a table of all. A second start goes on where the first ended: what has a
result of this commit, command and GPU is not run again, good or bad. A step that was cut off has none. One
that lacks something (a package, a program, or what it says with exit status 77) is asked again at each
start, also by another environment's Python.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
QUEUE = Path(__file__).with_suffix(".yaml")
LIMIT = 480.0  # seconds of a step
LACKING = 77  # exit status of a step that cannot be run here; its last line says what it needs
_HARDWARE = """
import json, machine, torch, triton
facts = machine.machine() | {"triton": triton.__version__}
if torch.cuda.is_available():
    import kernel_report
    facts |= kernel_report.describe_machine(None)
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Step:
    """One command for a shell, and what it needs."""

    name: str
    command: str
    needs: tuple[str, ...] = ()
    limit: float = LIMIT


def read_queue(path: Path = QUEUE) -> tuple[Step, ...]:
    """Return the steps of a file, with groups of packages in place of their names."""
    queue = yaml.safe_load(path.read_text())
    steps = []
    for name, step in queue["steps"].items():
        step = {"command": step} if isinstance(step, str) else step
        groups = [queue["groups"].get(need, [need]) for need in step.pop("needs", ())]
        needs = dict.fromkeys(need for group in groups for need in group)
        steps.append(Step(name, needs=tuple(needs), **step))
    return tuple(steps)


def main() -> None:
    """List the queue, or work through it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="list the queue and run nothing")
    parser.add_argument("--again", nargs="+", default=[], metavar="STEP", help="forget these results")
    parser.add_argument("--minutes", type=float, help="start no step that may end later than this")
    parser.add_argument("--anyway", action="store_true", help="without a GPU too: do the commands start?")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu", metavar="DIR")
    args = parser.parse_args()
    for name in ("SIGTERM", "SIGHUP"):  # the step ends with the queue
        signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
    steps, output = read_queue(), args.output.absolute()
    if unknown := {*args.again} - {step.name for step in steps}:
        parser.error(f"no step is called {', '.join(sorted(unknown))}; --dry-run lists them")
    if args.dry_run:
        for step in steps:
            print(f"{step.name:18} {_state(step, output) or 'to do':10} {_shell(step, output)}")
        return
    hardware = describe_hardware()
    if "gpu" not in hardware and not args.anyway:
        sys.exit("torch finds no GPU here, so nothing was run; --dry-run lists the queue")
    for name in args.again:
        (output / name / "result.json").unlink(missing_ok=True)
    sys.exit(0 if run_queue(steps, output, hardware, args.minutes) else 1)


def describe_hardware() -> dict[str, Any]:
    """Ask a process of its own, which leaves no memory of the GPU taken; no `gpu` where there is none."""
    command = [sys.executable, "-c", _HARDWARE]
    asked = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    return json.loads(asked.stdout) if asked.returncode == 0 else {"unknown": asked.stderr[-500:]}


def run_queue(
    steps: Sequence[Step], output: Path, hardware: dict[str, Any], minutes: float | None = None
) -> bool:
    """Run what has no result yet; return whether all that have one passed."""
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    for step in steps:
        if state := _state(step, output, hardware):
            print(f"{step.name}: {state} before")
            continue
        lacking = [need for need in step.needs if not _is_there(need)]
        if not lacking and time.monotonic() + step.limit > end:
            print(f"{step.name}: too little of {minutes:g} minutes is left")
            break
        print(f"{step.name} ...", end=" ", flush=True)
        result = {"state": f"needs {', '.join(lacking)}"} if lacking else _run(step, output)
        _write(output / step.name, {"step": step.name, **result, "hardware": hardware})
        print(result["state"], flush=True)
        (output / "README.md").write_text("\n".join(_table(steps, output)) + "\n")
    left = [step.name for step in steps if not _state(step, output, hardware)]
    if left:
        print(f"not run: {', '.join(left)}")
    return all(_state(step, output, hardware) in ("", "passed") for step in steps)


def _run(step: Step, output: Path) -> dict[str, Any]:
    directory, start = output / step.name, time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    command = _shell(step, output)
    options = {"cwd": ROOT, "env": _environment(), "stdin": subprocess.DEVNULL, "start_new_session": True}
    with (directory / "log.txt").open("w") as log:
        process = subprocess.Popen(["bash", "-c", command], stdout=log, stderr=subprocess.STDOUT, **options)
        try:
            state = "failed" if process.wait(step.limit) else "passed"
        except subprocess.TimeoutExpired:
            state = "time limit"
        finally:  # what it started ends with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    if status == LACKING:
        state = f"needs {(directory / 'log.txt').read_text().rstrip().rpartition(chr(10))[2]}"
    return {
        "state": state,
        "exit": None if state == "time limit" else status,
        "seconds": round(time.monotonic() - start, 1),
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _write(directory: Path, result: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    new = directory / "result.json.new"
    new.write_text(json.dumps(result, indent=2) + "\n")
    new.replace(directory / "result.json")


def _result(step: Step, output: Path) -> dict[str, Any]:
    file = output / step.name / "result.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _state(step: Step, output: Path, hardware: dict[str, Any] | None = None) -> str:
    """Return what became of the step; nothing where it is to be run, on this `hardware` and commit."""
    result = _result(step, output)
    is_of_now = result.get("command") == _shell(step, output) and all(
        result["hardware"].get(fact) == hardware.get(fact) for fact in ("gpu", "commit") if hardware
    )
    return result["state"] if is_of_now and not result["state"].startswith("needs ") else ""


def _table(steps: Sequence[Step], output: Path) -> Iterator[str]:
    yield "| step | result | seconds | on |\n|---|---|---|---|"
    for result in filter(None, (_result(step, output) for step in steps)):
        gpu = result["hardware"].get("gpu", "no GPU")
        yield f"| {result['step']} | {result['state']} | {result.get('seconds', '')} | {gpu} |"


def _shell(step: Step, output: Path) -> str:
    places = {"PYTHON": sys.executable, "OUT": str(output / step.name)}
    return re.sub(r"\b(PYTHON|OUT)\b", lambda name: shlex.quote(places[name[0]]), step.command)


def _is_there(need: str) -> bool:
    return bool(shutil.which(need[1:]) if need.startswith("!") else find_spec(need))


def _environment() -> dict[str, str]:
    folders = (ROOT, ROOT / "benchmarks", ROOT / "tests/support", ROOT / "tools/engine_classes")
    before = filter(None, [os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, folders), *before])}


if __name__ == "__main__":
    main()
