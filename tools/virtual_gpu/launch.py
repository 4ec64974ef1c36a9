"""Real launchers, whose compiled kernels run here."""

import contextlib
import os
from unittest import mock

import numpy as np
import torch
from kernels.offline import pretend
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from tune_kernels import pinned

from virtual_gpu.machine import Machine
from virtual_gpu.memory_access import GlobalMemory
from virtual_gpu.program import FaultError, parse

_KINDS = {"fp32": np.float32, "i32": np.int32, "i64": np.int64, "u32": np.uint32, "i1": np.int8}


@contextlib.contextmanager
def virtual_gpu(target, change=lambda name, text: text, configs=None):
    """Run kernels compiled for a target up to PTX, changed by name and PTX; `configs` replace the table's."""
    if os.environ.get("TRITON_INTERPRET") != "0":
        raise RuntimeError("Triton would interpret kernels: set TRITON_INTERPRET=0")
    parsed = {}

    def run(kernel):
        text = change(kernel.name, kernel.asm["ptx"])
        if text not in parsed:
            parsed[text] = parse(text)
        return lambda *given: _launch(kernel, parsed[text], given[:3], given[9:])

    own = {"run": property(run), "_init_handles": lambda self: None, "function": None}
    own["launch_metadata"] = lambda self, *arguments: None
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend(target))
        for name, config in (configs or {}).items():
            stack.enter_context(pinned(name, config))
        for name, value in own.items():
            stack.enter_context(mock.patch.object(CompiledKernel, name, value, create=True))
        # NVIDIA's assembler takes as long as all else, and nothing here looks at what it makes
        stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", return_value=b""))
        yield


def _launch(kernel, program, grid, arguments):
    given = [*zip(kernel.src.signature.values(), arguments, strict=True)]
    given = [(kind, argument) for kind, argument in given if kind != "constexpr"]
    if len(given) != len(program.params) - 2:  # Triton adds memory of its own, here none
        raise FaultError(f"{len(given)} arguments for {len(program.params)} parameters")
    tensors = [argument for _, argument in given if isinstance(argument, torch.Tensor)]
    params = np.zeros(sum(program.params[-1]), np.uint8)
    for (offset, size), (kind, argument) in zip(program.params, given, strict=False):
        if isinstance(argument, torch.Tensor):
            value = np.array([argument.data_ptr()], np.uint64)
        else:
            value = np.array([argument]).astype(_KINDS[kind])
        params[offset : offset + size] = value.view(np.uint8)
    Machine(program, grid, params, GlobalMemory(tensors), kernel.metadata.shared).run()
