"""Where kernels run, and memory that no kernel has written."""

import pytest
import torch
from new_memory import nan_in_new_memory  # noqa: F401  for all tests here


@pytest.fixture(scope="session")
def device():
    """A GPU where there is one; else Triton's interpreter runs the kernels on the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
