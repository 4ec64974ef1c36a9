"""Compile a launcher's kernels for a GPU that is not there."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction, driver

from fp8kv_runtime.kernels.targets import Target


@dataclass(frozen=True)
class Launch:
    """A kernel with everything that its compilation depends on."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]  # types of the arguments
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[tuple[tuple[int, ...], tuple[tuple[str, int], ...]], ...]  # what of them is known
    options: Any  # the backend's, frozen

    @property
    def name(self) -> str:
        """The kernel's name, or `extend_kernel` for decode's where it takes a prompt in one part."""
        constants = dict(self.constants)
        return "extend_kernel" if constants.get("WHOLE") and constants["EXTENDS"] else self.kernel

    @property
    def layer(self) -> dict[str, Any]:
        """The constants that the layer fixes."""
        return {name: constant.value for name, constant in vars(dict(self.constants)["LAYER"]).items()}


@dataclass(frozen=True)
class Compiled:
    """The compiler's output for a launch."""

    asm: str  # PTX or amdgcn
    code: str  # what the GPU executes: SASS or amdgcn
    ttir: str
    num_warps: int
    shared_memory: int
    registers: int
    spilled: dict[str, int]  # what spilling is measured in -> how much


def launches(target: Target, call: Callable[[], Any]) -> list[Launch]:
    """Record the kernels that `call` launches on `target`; none of them is compiled or runs."""
    recorded = []

    def record(
        self: Any, _key: str, signature: Any, _device: Any, constants: Any, options: Any, attrs: Any, *_: Any
    ) -> None:
        recorded.append(
            Launch(
                self.module,
                self.__name__,
                tuple(signature.items()),
                tuple((self.arg_names[at[0]], value) for at, value in constants.items()),
                tuple((at, tuple(map(tuple, known))) for at, known in attrs.items()),
                options,
            )
        )

    # without a compiled kernel Triton launches none
    with pretend(target), mock.patch.object(JITFunction, "_do_compile", record):
        call()
    return recorded


def compile_launch(launch: Launch, target: Target) -> Compiled:
    """Compile a launch for its target.

    Raises:
        triton.CompilationError: Triton does not accept the kernel.
        triton.runtime.errors.PTXASError: NVIDIA's assembler does not accept it.
    """
    kernel = getattr(import_module(launch.module), launch.kernel)
    aligned = {at: list(map(list, known)) for at, known in launch.aligned}
    source = ASTSource(kernel, dict(launch.signature), dict(launch.constants), aligned)
    with pretend(target):
        compiled = triton.compile(source, target=gpu_target(target), options=launch.options.__dict__)
    if target.backend == "hip":
        asm = code = compiled.asm["amdgcn"]
        registers, spilled = amd_resources(asm)
    else:
        asm = compiled.asm["ptx"]
        code = _dumped(compiled.asm["cubin"])
        registers, spilled = nvidia_resources(code)
        if any(spilled.values()):
            spilled["accesses to the stack in a loop"] = stack_accesses_in_loops(code)
    metadata = compiled.metadata
    return Compiled(asm, code, compiled.asm["ttir"], metadata.num_warps, metadata.shared, registers, spilled)


def nvidia_resources(usage: str) -> tuple[int, dict[str, int]]:
    """Read registers and what is spilled from `cuobjdump -res-usage`."""
    found = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return found["REG"], {
        "bytes of stack": found["STACK"],
        "bytes of local memory": found["LOCAL"],
    }


def stack_accesses_in_loops(sass: str) -> int:
    """Count loads and stores of local memory that a backward branch repeats."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    branches = [(at, re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)) for at, text in code]
    loops = [(int(m[1], 16), at) for at, m in branches if m and int(m[1], 16) < at]
    local = [at for at, text in code if re.search(r"\b(LDL|STL)\b", text)]
    return sum(any(first <= at <= last for first, last in loops) for at in local)


def amd_resources(asm: str) -> tuple[int, dict[str, int]]:
    """Read registers and what is spilled from the metadata at the end of amdgcn."""
    found = {name: int(n) for name, n in re.findall(r"^\s+\.(\w+):\s+(\d+)$", asm, re.MULTILINE)}
    return found["vgpr_count"], {
        "vector registers": found["vgpr_spill_count"],
        "scalar registers": found["sgpr_spill_count"],
        "bytes of scratch": found["private_segment_fixed_size"],
    }


def _dumped(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def gpu_target(target: Target) -> GPUTarget:
    """Return Triton's name of a target."""
    return GPUTarget(target.backend, target.arch, 64 if target.backend == "hip" else 32)


class _AbsentGPU:
    """The part of a Triton driver that compilation asks for."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return gpu_target(self._target)

    def get_current_device(self) -> str:
        # Triton keeps what it has compiled by device
        return self._target.name

    def get_current_stream(self, device: str) -> int:
        return 0


@contextlib.contextmanager
def pretend(target: Target) -> Iterator[None]:
    """Inside, Triton takes this GPU for the one that is here."""
    previous = driver._active
    driver.set_active(_AbsentGPU(target))
    try:
        yield
    finally:
        driver.set_active(previous)
