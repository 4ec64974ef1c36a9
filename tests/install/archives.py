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


def _contents(wheel):
    with ZipFile(wheel) as archive:
        return {n: hashlib.sha256(archive.read(n)).hexdigest() for n in archive.namelist()}
