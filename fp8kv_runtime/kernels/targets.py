"""GPU architectures and their FP8 instructions."""

import functools
import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """A GPU architecture as kernels see it."""

    name: str
    backend: str  # "cuda", "hip" or "interpreter"
    arch: int | str  # 90, or "gfx942"
    shared_memory: int = 0  # bytes that one program may use
    decoded: tuple[str, ...] = ()  # formats that an instruction turns into float16
    encoded: tuple[str, ...] = ()  # formats that an instruction rounds to as `quantize` does
    # formats that matrix instructions take as they are. On sm_90 and sm_100 only extend multiplies in FP8:
    # decode has 16 rows, and there the assembler makes float16 products of them
    multiplied: tuple[str, ...] = ()

    @property
    def overlaps(self) -> bool:
        """Return whether a kernel may start before the one that it waits for has ended (dependent launch)."""
        return self.backend == "cuda" and int(self.arch) >= 90


_OCP = ("e4m3fn", "e5m2")

INTERPRETER = Target("interpreter", "interpreter", 0)
# an unlisted NVIDIA GPU does as the listed one before it
TARGETS: dict[str, Target] = {
    "sm_80": Target("sm_80", "cuda", 80, 166_912),
    # rounds twice on the way to FP8, by way of float16 (triton #11753)
    "sm_89": Target("sm_89", "cuda", 89, 101_376, _OCP, (), _OCP),
    "sm_90": Target("sm_90", "cuda", 90, 232_448, _OCP, _OCP, _OCP),
    "sm_100": Target("sm_100", "cuda", 100, 232_448, _OCP, _OCP, _OCP),
    # what AMD's instructions do with values out of range is not documented: encoded by integers
    "gfx942": Target("gfx942", "hip", "gfx942", 65_536, ("e4m3fnuz",), (), ("e4m3fnuz",)),
    "gfx950": Target("gfx950", "hip", "gfx950", 163_840, _OCP, (), _OCP),
}


@functools.cache
def find_target(backend: str, arch: int | str) -> Target:
    """Return the listed target with the same instructions as this architecture."""
    if backend == "hip":
        return TARGETS.get(str(arch), Target(str(arch), "hip", arch))
    older = [t for t in TARGETS.values() if t.backend == "cuda" and int(t.arch) <= int(arch)]
    return older[-1] if older else TARGETS["sm_80"]


def can_run(on_gpu: bool) -> bool:
    """Return whether kernels run here: on a GPU, or in Triton's interpreter."""
    return on_gpu or os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def gpu_name(device: torch.device) -> str:
    """Return the GPU's name, as the driver has it; empty for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return how many streaming multiprocessors or compute units there are."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
