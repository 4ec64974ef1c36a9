"""Build wheel and sdist, install them into empty environments, run the main job and tests there.

check_install.py   every Python and resolution; exit 0 if all passed. Needs uv, which takes torch
                   from where UV_TORCH_BACKEND, UV_FIND_LINKS and UV_OVERRIDE say.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from archives import build, differences
from environment import Environment
from installed_checks import CHECKS

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "installs.json"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
RESOLUTIONS = ("lowest-direct", "highest")


def main():
    options = parse()
    scratch = options.scratch.resolve()
    shutil.rmtree(scratch, ignore_errors=True)
    wheel, from_sdist = build(ROOT, scratch / "dist")
    found = differences(wheel, from_sdist)
    print(f"{wheel.name}: {len(found)} files differ from the sdist's wheel {found}", flush=True)
    rows = []
    for python in options.python or PYTHONS:
        for resolution, archive in zip(RESOLUTIONS, (wheel, from_sdist), strict=True):
            if resolution in (options.resolution or RESOLUTIONS):
                rows.append(check(python, resolution, archive, options))
                print(json.dumps(rows[-1]), flush=True)
    if options.record:
        record(rows)
    sys.exit(1 if found or not all(row["passed"] for row in rows) else 0)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="repeatable; default: all of them")
    parser.add_argument("--resolution", action="append", choices=RESOLUTIONS)
    parser.add_argument("--torch", help="this version alone")
    parser.add_argument("--scratch", type=Path, default=Path("build/install"))
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    parser.add_argument("--record", action="store_true", help=f"into {RESULTS.name}")
    return parser.parse_args()


def check(python, resolution, archive, options):
    """Install `archive` into an empty environment; run everything there."""
    started = time.monotonic()
    row = {"python": python, "resolution": resolution, "passed": False, "checks": []}
    path = options.scratch.resolve() / f"{python}-{resolution}"
    constraints = (f"torch=={options.torch}",) if options.torch else ()
    environment = Environment(path, python, archive, resolution, constraints)
    try:
        environment.create()
        row["python"] = environment.version()
        environment.install_ours()
        row["versions"] = environment.versions()
        for name, checked in CHECKS.items():
            checked(environment)
            row["checks"].append(name)
        row["passed"] = True
    except subprocess.CalledProcessError as error:
        row["failed"] = f"{error.cmd}: {(error.stderr or error.stdout)[-2000:]}"
    except (AssertionError, subprocess.TimeoutExpired) as error:
        row["failed"] = str(error)
    finally:
        if not options.keep:
            environment.remove()
    return row | {"seconds": round(time.monotonic() - started)}


def record(rows):
    """Replace the rows of the same Python and resolution; the others stay."""
    before = json.loads(RESULTS.read_text())["installs"] if RESULTS.exists() else []
    merged = {place(row): row for row in [*before, *rows]}
    installs = [merged[each] for each in sorted(merged)]
    document = {"system": f"{platform.system()} {platform.machine()}", "installs": installs}
    RESULTS.write_text(json.dumps(document, indent=2) + "\n")


def place(row):
    minor = int(row["python"].split(".")[1])
    return minor, RESOLUTIONS.index(row["resolution"])


if __name__ == "__main__":
    main()
