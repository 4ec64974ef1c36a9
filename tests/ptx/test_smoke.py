"""A few of the matrix's tests; all of them: `make test-ptx`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMOKE = (
    *("append[sm_80-D80]", "append[sm_90-D64]", "extend[sm_90-plain-D64]"),
    *("decode[sm_80-plain-D64]", "decode[sm_89-plain-q_head]", "decode[sm_90-masked]"),
    *("decode[sm_100-plain-D64]", "extend[sm_100-plain-D64]"),
)


def test_compiled_kernels_are_right():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += [f"tests/ptx/test_matrix.py::test_{name}" for name in SMOKE]
    own = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert f"{len(SMOKE)} passed" in done.stdout
