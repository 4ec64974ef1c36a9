"""The wheel, and the wheel that the sdist makes."""

import hashlib
import subprocess
from zipfile import ZipFile


def build(root, out):
    """Build both, and the sdist between them; returns the wheels."""
    wheel = _built(root, "--wheel", out / "wheel")
    sdist = _built(root, "--sdist", out / "sdist")
    return wheel, _built(sdist, "--wheel", out / "wheel-from-sdist")


def _built(source, form, out):
    subprocess.run(["uv", "build", "-q", form, "-o", str(out), str(source)], check=True)
    (archive,) = (p for p in out.iterdir() if p.name.endswith((".whl", ".tar.gz")))
    return archive


def differences(one, other):
    """Names of files that two wheels do not share, bit for bit."""
    first, second = _contents(one), _contents(other)
    return sorted(name for name in first | second if first.get(name) != second.get(name))


def requirements(wheel, extra=""):
    """What a wheel needs; with an `extra`, what that adds."""
    with ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().partition("\n\n")[0].splitlines()
    found = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    parts = [each.rpartition("; extra == ") for each in found]
    if not extra:
        return [last for _, separator, last in parts if not separator]
    return [first for first, _, last in parts if last.strip("'\"") == extra]


def _contents(wheel):
    with ZipFile(wheel) as archive:
        return {n: hashlib.sha256(archive.read(n)).hexdigest() for n in archive.namelist()}
