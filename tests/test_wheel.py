"""The wheel takes two names of site-packages, and runs beside a user's own `cli` and `recipes`."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
RECIPES = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
CARDS = {"as_it_is", "bake", "output", "outputs", "pack", "stress"}
# what a user may have where our commands are run
OWN = ("cli.py", "recipes.py", "recipes/__init__.py", "commands.py", "app.py")


def run(*command, **options):
    command = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


def built(source, form, home):
    run("hatchling", "build", "--target", form, "--directory", home, cwd=source)
    (archive,) = home.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def work(tmp_path):
    """A user's directory, whose modules nobody may import."""
    for name in OWN:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('a file of the user was run')\n")
    return tmp_path


def test_the_wheel_takes_the_names_of_our_two_packages_and_the_sdist_makes_the_same(wheel, tmp_path):
    names, version = set(ZipFile(wheel).namelist()), wheel.name.split("-")[1]
    assert {name.split("/")[0] for name in names} == {"calib", "fp8kv_runtime", f"fp8kv-{version}.dist-info"}
    assert {f"calib/recipes/{name}.yaml" for name in RECIPES} <= names
    assert {f"calib/formats/cards/{name}.md.j2" for name in CARDS} <= names
    with tarfile.open(built(ROOT, "sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert set(ZipFile(built(source, "wheel", tmp_path / "wheel")).namelist()) == names


def printed(work, *command, path=None):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_of_the_wheel_runs_beside_files_of_the_same_names(wheel, work, tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    flags = ("--quiet", "--no-index", "--no-deps", "--disable-pip-version-check")
    run("pip", "install", *flags, "--target", site, wheel)
    scripts = {path.name for path in (site / "bin").iterdir()}
    assert scripts == {"fp8kv", "fp8kv-calibrate", "fp8kv-eval"}
    for name in scripts:
        assert printed(work, site / "bin" / name, "--version", path=site).startswith("fp8kv ")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    for program in ((site / "bin" / "fp8kv",), (*torchrun, "-m", "calib")):
        shown = printed(work, *program, "recipes", path=site)
        assert all(name in shown for name in RECIPES)
    # and so does a checkout's
    shown = printed(work, sys.executable, ROOT / "cli.py", "recipes", "tensor-absmax")
    assert shown == (ROOT / "recipes" / "tensor-absmax.yaml").read_text()
