"""Launch kernels on two absent GPUs; print which one was current at every allocation and launch.

A script for `test_launch.py`: kernels that an interpreter runs are launched in another way.
"""

import contextlib
import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
from kernels.offline import _AbsentGPU
from kernels.variants import VARIANTS
from triton.compiler import CompiledKernel
from triton.runtime import driver

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.kernels.append_kv import append_kv
from fp8kv_runtime.kernels.decode import decode_attention
from fp8kv_runtime.kernels.extend import extend_attention
from fp8kv_runtime.kernels.targets import TARGETS

current, entered, seen = 0, [], []


class TwoGPUs(_AbsentGPU):
    """Triton's driver; a stream is the number of its GPU."""

    def get_current_device(self):
        return current

    def get_current_stream(self, device):
        return device


class Fake(torch.Tensor):
    """On the CPU, and says that it is not; so does all that is made of it."""


class OnFirst(Fake):
    device = torch.device("cuda:0")


class OnSecond(Fake):
    device = torch.device("cuda:1")


KINDS = {"cuda:0": OnFirst, "cuda:1": OnSecond}


@contextlib.contextmanager
def made_current(device):
    global current
    before, current = current, device.index
    entered.append(device.index)
    try:
        yield
    finally:
        current = before


def recorded(allocate):
    def allocated(*given, device=None, **named):
        if sys._getframe(1).f_globals["__name__"].startswith("fp8kv_runtime.kernels"):
            seen.append([allocate.__name__, current])
        made = allocate(*given, **named)
        return made if str(device) not in KINDS else made.as_subclass(KINDS[str(device)])

    return allocated


def record(kernel):
    def run(_x, _y, _z, stream, *_):
        seen.append([kernel.name, current, stream, id(kernel)])

    return run


def on(kind, made):
    """The same dataclass with its tensors on the GPU of this kind."""
    tensors = {n: x.as_subclass(kind) for n, x in vars(made).items() if isinstance(x, torch.Tensor)}
    return replace(made, **tensors)


def call(kind):
    """All launchers, twice; the last call is refused."""
    blocks, sequences = on(kind, variant.blocks(target)), on(kind, variant.sequences())
    assert isinstance(sequences, PagedSequences)
    query, new = (torch.zeros(4, h, 64).half().as_subclass(kind) for h in (32, 8))
    ends = torch.arange(5, dtype=torch.int32).as_subclass(kind)
    slots = torch.zeros(4, dtype=torch.int64).as_subclass(kind)
    for _ in range(2):
        append_kv(new, new, blocks, slots)
        decode_attention(query, blocks, sequences)
        for most in (1, 2000):  # KV is split, then not
            extend_attention(query, blocks, sequences, ends, most)
    with contextlib.suppress(ValueError):
        decode_attention(query[:, :, :8], blocks, sequences)


for name in ("empty", "empty_like", "zeros_like"):
    setattr(torch, name, recorded(getattr(torch, name)))
torch.cuda.device = made_current
torch.cuda.get_device_name = lambda device: "an absent GPU"
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
CompiledKernel.run = property(record)
CompiledKernel._init_handles = lambda self: None
CompiledKernel.launch_metadata = lambda self, *arguments: None
CompiledKernel.function = None

target, variant = TARGETS["sm_90"], next(v for v in VARIANTS if v.name == "plain-64")
driver.set_active(TwoGPUs(target))
found = []
for given, kind in ((0, OnFirst), (0, OnSecond), (1, OnSecond)):
    current = given
    call(kind)
    found.append({"entered": list(entered), "seen": list(seen), "after": current})
    entered.clear()
    seen.clear()
sys.stdout.write(json.dumps(found))
