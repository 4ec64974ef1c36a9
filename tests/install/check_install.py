"""Build wheel and sdist, install them into empty environments by uv, run the main job and tests there."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

from installed_checks import CHECKS

ROOT, RESULTS = Path(__file__).parents[2], Path(__file__).parent / "installs.json"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
RESOLUTIONS = ("lowest-direct", "highest")
# what would lead to the checkout, or to what was made before
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTEST_ADDOPTS")
_LIST = (
    "import json; from importlib.metadata import distributions; "
    "print(json.dumps({d.name.lower().replace('_', '-'): d.version for d in distributions()}))"
)


@dataclass(frozen=True)
class Environment:
    path: Path
    python: str
    archive: Path  # our wheel
    resolution: str  # uv's word: lowest-direct, highest

    @property
    def bin(self):
        return self.path / "venv" / "bin"

    @property
    def work(self):
        return self.path / "work"

    def create(self):
        shutil.rmtree(self.path, ignore_errors=True)
        self.work.mkdir(parents=True)
        uv("venv", "--python", self.python, self.path / "venv")

    def install_ours(self, extra=""):
        with ZipFile(self.archive) as archive:
            (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            needed = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist")
        parts = [each.partition("; extra == ") for each in needed]
        # the oldest is taken of what is named to uv, so each dependency is
        named = [first for first, _, last in parts if last.strip("'\"") == extra]
        self.install("--resolution", self.resolution, "--no-build", self.archive, *named)

    def install(self, *arguments):
        uv("pip", "install", "--python", self.bin / "python", *arguments)

    def run(self, *command, status=0):
        own = {k: v for k, v in os.environ.items() if k not in _FOREIGN}
        own |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
        own |= {"PATH": f"{self.bin}{os.pathsep}{own['PATH']}", "XDG_CACHE_HOME": str(self.path / "cache")}
        options = {"cwd": self.work, "capture_output": True, "text": True, "timeout": 1500}
        done = subprocess.run([str(self.bin / command[0]), *map(str, command[1:])], env=own, **options)
        if done.returncode != status:
            said, shown = done.stderr or done.stdout, " ".join(map(str, command))
            raise subprocess.CalledProcessError(done.returncode, shown, done.stdout, said)
        return done.stdout + done.stderr

    def versions(self):
        return dict(sorted(json.loads(self.run("python", "-c", _LIST)).items()))


def uv(command, *arguments):
    subprocess.run(["uv", command, *map(str, arguments), "-q"], check=True, capture_output=True, text=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", help="repeatable; default: all of them")
    parser.add_argument("--resolution", action="append", choices=RESOLUTIONS)
    parser.add_argument("--record", action="store_true", help=f"into {RESULTS.name}")
    options = parser.parse_args()
    scratch = Path("build/install").resolve()
    shutil.rmtree(scratch, ignore_errors=True)
    wheel, sdist = (built(ROOT, form, scratch / "dist" / form) for form in ("wheel", "sdist"))
    from_sdist, rows = built(sdist, "wheel", scratch / "dist/wheel-from-sdist"), []
    for python in options.python or PYTHONS:
        for resolution, archive in zip(RESOLUTIONS, (wheel, from_sdist), strict=True):
            if resolution in (options.resolution or RESOLUTIONS):
                rows.append(check(python, resolution, archive, scratch / f"{python}-{resolution}"))
                print(json.dumps(rows[-1]), flush=True)
    if options.record:
        record(rows)
    sys.exit(0 if all(row["passed"] for row in rows) else 1)


def built(source, form, out):
    uv("build", f"--{form}", "-o", out, source)
    return next(p for p in out.iterdir() if p.name.endswith((".whl", ".tar.gz")))


def check(python, resolution, archive, path):
    started = time.monotonic()
    row = {"python": python, "resolution": resolution, "passed": False, "checks": []}
    environment = Environment(path, python, archive, resolution)
    try:
        environment.create()
        row["python"] = environment.run("python", "--version").split()[1]
        environment.install_ours()
        row["versions"] = environment.versions()
        for checked in CHECKS:
            checked(environment)
            row["checks"].append(checked.__name__)
        row["passed"] = True
    except (AssertionError, subprocess.SubprocessError) as error:
        row["failed"] = f"{error} {str(getattr(error, 'stderr', ''))[-2000:]}"
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return row | {"seconds": round(time.monotonic() - started)}


def record(rows):
    rows = [*json.loads(RESULTS.read_text())["installs"], *rows]
    latest = {(int(r["python"].split(".")[1]), RESOLUTIONS.index(r["resolution"])): r for r in rows}
    installs = [latest[place] for place in sorted(latest)]
    document = {"system": f"{platform.system()} {platform.machine()}", "installs": installs}
    RESULTS.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
