"""Where kernels run, with which tiles, and memory that no kernel has written."""

import pytest
import torch
from kernel_setting import nan_in_new_memory, table_of_small_tiles  # noqa: F401  the first for all tests here

from fp8kv_runtime.kernels import tuning


@pytest.fixture(scope="session")
def device():
    """A GPU where there is one; else Triton's interpreter runs the kernels on the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def small_tiles(tmp_path_factory):
    """Tiles of 32 in the interpreter: short sequences have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8KV_TUNING", str(table_of_small_tiles(tmp_path_factory.mktemp("tiles"))))
        tuning.forget_tuned()
        yield
    tuning.forget_tuned()
