"""Kernels are compiled here, which Triton decides when it is imported: `make test-ptx`."""

import os
import sys

import pytest
from kernel_setting import nan_in_new_memory  # noqa: F401  for all tests here

COMPILED = os.environ.get("TRITON_INTERPRET") == "0"
# in any other run `test_smoke.py` starts some of them by itself
_COMPILED_HERE = ["test_matrix.py", "test_mutations.py"]
collect_ignore = ["test_smoke.py"] if COMPILED else _COMPILED_HERE
if sys.platform != "linux":  # where there is no Triton
    collect_ignore_glob = ["test_*.py"]
# what Triton 3.9 warns about where nobody said
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.fixture(autouse=True, scope="session")
def _compiled_here_alone(tmp_path_factory):
    """Nothing compiled earlier stands in, and nothing made here without an assembler stays."""
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
