"""An empty virtual environment that uv makes, and commands run in it."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

# what would lead to the checkout, or to what was made before
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTEST_ADDOPTS")
_LIST = (
    "import json; from importlib.metadata import distributions; "
    "print(json.dumps({d.name.lower().replace('_', '-'): d.version for d in distributions()}))"
)


@dataclass(frozen=True)
class Environment:
    """A directory: the environment, a place to work in, and caches of its own."""

    path: Path
    python: str
    archive: Path  # our wheel
    resolution: str  # uv's word: lowest-direct, highest
    constraints: tuple[str, ...] = ()

    @property
    def bin(self):
        return self.path / "venv" / "bin"

    @property
    def work(self):
        return self.path / "work"

    def create(self):
        self.remove()
        self.work.mkdir(parents=True)
        command = ["uv", "venv", "-q", "--python", self.python, str(self.path / "venv")]
        subprocess.run(command, check=True, capture_output=True, text=True)

    def remove(self):
        shutil.rmtree(self.path, ignore_errors=True)

    def install_ours(self, extra=""):
        """Install our archive and what it, or an `extra` of it, needs: oldest or newest wheels."""
        with ZipFile(self.archive) as archive:
            (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            needed = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist")
        parts = [each.partition("; extra == ") for each in needed]
        # the oldest is taken of what is named to uv, so each dependency is
        named = [first for first, _, last in parts if last.strip("'\"") == extra]
        self.install([str(self.archive), *named], "--resolution", self.resolution, "--no-build")

    def install(self, packages, *flags):
        file = self.work / "constraints.txt"
        file.write_text("\n".join(self.constraints))
        python = str(self.bin / "python")
        command = ["uv", "pip", "install", "-q", "--python", python, "-c", str(file), *flags]
        subprocess.run([*command, *packages], check=True, capture_output=True, text=True)

    def run(self, *command, status=0):
        """Run what is installed here, in the place to work in; returns what it printed."""
        done = subprocess.run(
            [str(self.bin / command[0]), *map(str, command[1:])],
            cwd=self.work, env=self.variables(), capture_output=True, text=True, timeout=1500,
        )  # fmt: skip
        if done.returncode != status:
            said = done.stderr or done.stdout
            shown = " ".join(map(str, command))
            raise subprocess.CalledProcessError(done.returncode, shown, done.stdout, said)
        return done.stdout + done.stderr

    def variables(self):
        own = {k: v for k, v in os.environ.items() if k not in _FOREIGN}
        own["PATH"] = f"{self.bin}{os.pathsep}{own['PATH']}"
        own["XDG_CACHE_HOME"] = str(self.path / "cache")
        return own | {"HF_HUB_OFFLINE": "1", "COLUMNS": "120"}

    def version(self):
        return self.run("python", "-c", "import platform; print(platform.python_version())").strip()

    def versions(self):
        """Versions of all that is installed, by name."""
        return dict(sorted(json.loads(self.run("python", "-c", _LIST)).items()))
