"""Build wheel and sdist, install them into empty environments by uv, run the main job and tests there."""

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from zipfile import ZipFile

from environment import Environment
from installed_checks import CHECKS

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "installs.json"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
RESOLUTIONS = ("lowest-direct", "highest")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", help="repeatable; default: all of them")
    parser.add_argument("--resolution", action="append", choices=RESOLUTIONS)
    parser.add_argument("--torch", help="this version alone")
    parser.add_argument("--scratch", type=Path, default=Path("build/install"))
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    parser.add_argument("--record", action="store_true", help=f"into {RESULTS.name}")
    options = parser.parse_args()
    scratch = options.scratch.resolve()
    shutil.rmtree(scratch, ignore_errors=True)
    wheel, sdist = (built(ROOT, form, scratch / "dist" / form) for form in ("wheel", "sdist"))
    from_sdist = built(sdist, "wheel", scratch / "dist/wheel-from-sdist")
    first, second = contents(wheel), contents(from_sdist)
    found = sorted(name for name in first | second if first.get(name) != second.get(name))
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


def built(source, form, out):
    subprocess.run(["uv", "build", "-q", f"--{form}", "-o", str(out), str(source)], check=True)
    (archive,) = (p for p in out.iterdir() if p.name.endswith((".whl", ".tar.gz")))
    return archive


def contents(wheel):
    with ZipFile(wheel) as archive:
        return {n: hashlib.sha256(archive.read(n)).hexdigest() for n in archive.namelist()}


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
    merged = {}
    for row in [*json.loads(RESULTS.read_text())["installs"], *rows]:
        merged[int(row["python"].split(".")[1]), RESOLUTIONS.index(row["resolution"])] = row
    installs = [merged[place] for place in sorted(merged)]
    document = {"system": f"{platform.system()} {platform.machine()}", "installs": installs}
    RESULTS.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
