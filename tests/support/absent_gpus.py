"""For `test_compile.py`: launch kernels on absent GPUs; print what would have run on them, by function."""

import contextlib
import json
import math
import os
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
from kernels.offline import _AbsentGPU, launches, pretend
from kernels.variants import VARIANTS
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.kernels.append_kv import append_kv
from fp8kv_runtime.kernels.attention import decode_attention, extend_attention
from fp8kv_runtime.kernels.targets import TARGETS

TARGET, PLAIN = TARGETS["sm_90"], next(v for v in VARIANTS if v.name == "plain-64")


def give_kernels_to(run):
    CompiledKernel.run = property(lambda kernel: lambda *given: run(kernel, *given))
    CompiledKernel._init_handles = lambda self: None
    CompiledKernel.launch_metadata = lambda self, *arguments: None
    CompiledKernel.function = None


def twice():
    """What the driver gets, and what Triton is asked for: the same twice, then a query not aligned."""
    find, found = JITFunction.run, {}

    def record(kernel, *given):
        # of memory allocated anew only what it is
        plain = [[str(x.dtype), *x.shape] if isinstance(x, torch.Tensor) else repr(x) for x in given[9:]]
        launched.append([kernel.name, id(kernel), given[:3], plain])

    def counted(self, *arguments, **options):
        by_triton.append(self.fn.__name__)
        return find(self, *arguments, **options)

    JITFunction.run = counted
    give_kernels_to(record)
    for variant in (v for v in VARIANTS if v.name in ("plain-64", "float16-64")):
        launched, by_triton, blocks, options = [], [], variant.blocks(TARGET), variant.options()
        shape = (4, variant.group * 8, variant.head_dim)
        memory = torch.zeros(math.prod(shape) + 1, dtype=variant.dtype)
        aligned, not_aligned = memory[:-1].view(shape), memory[1:].view(shape)
        new = torch.zeros(4, 8, variant.head_dim, dtype=variant.dtype)
        cu_seqlens, slots = torch.arange(5, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
        with pretend(TARGET):
            for query in (aligned, aligned, not_aligned):
                decode_attention(query, blocks, variant.sequences(), options, num_splits=2)
                extend_attention(query, blocks, variant.sequences(), cu_seqlens, 1, options)
                append_kv(new, new, blocks, slots)
        found[variant.name] = {"launched": launched, "by triton": by_triton}
    return found


def growing():
    """How often a kernel is compiled for growing batches, and how often Triton is asked for one."""
    asked = []

    def ask(self, *arguments, **options):
        asked.append(self.fn.__name__)
        return defaultdict(lambda: lambda *arguments: None)  # a compiled kernel, launched by grid

    def serve():
        blocks, options = PLAIN.blocks(TARGET), PLAIN.options()
        for num_seqs in range(1, 65):
            lengths = torch.full((num_seqs,), 64 * num_seqs, dtype=torch.int32)
            sequences = PagedSequences(torch.zeros(num_seqs, num_seqs, dtype=torch.int32), lengths)
            query = torch.zeros(num_seqs, 32, 64, dtype=torch.float16)
            new = torch.zeros(num_seqs, 8, 64, dtype=torch.float16)
            ends = torch.arange(num_seqs + 1, dtype=torch.int32)
            decode_attention(query, blocks, sequences, options, num_splits=2)
            for parts in (None, PLAIN.num_splits):
                extend_attention(query, blocks, sequences, ends, 1, options, num_splits=parts)
            append_kv(new, new, blocks, torch.zeros(num_seqs, dtype=torch.int64))

    # by what Triton would compile for, then by what our launchers tell apart
    compiled = [launch.kernel for launch in set(launches(TARGET, serve))]
    JITFunction.run = ask
    with pretend(TARGET):
        serve()
    return {name: {"compiled": compiled.count(name), "asked": asked.count(name)} for name in asked}


class OnFirst(torch.Tensor):
    """On the CPU, and says that it is not; so does all that is made of it."""

    device = torch.device("cuda:0")


class OnSecond(torch.Tensor):
    device = torch.device("cuda:1")


def on_devices():
    """Which of two GPUs was current at every allocation and launch: [name, GPU, stream, kernel]."""
    current, entered, seen = [0], [], []

    class TwoGPUs(_AbsentGPU):
        def get_current_device(self):
            return current[0]

        def get_current_stream(self, device):
            return device

    @contextlib.contextmanager
    def made_current(device):
        before, current[0] = current[0], device.index
        entered.append(device.index)
        try:
            yield
        finally:
            current[0] = before

    def recorded(allocate, *given, device=None, **named):
        if sys._getframe(1).f_globals["__name__"].startswith("fp8kv_runtime.kernels"):
            seen.append([allocate.__name__, current[0]])
        made, kind = allocate(*given, **named), {"cuda:0": OnFirst, "cuda:1": OnSecond}.get(str(device))
        return made.as_subclass(kind) if kind else made

    def call(kind):
        def on(made):
            tensors = {n: x.as_subclass(kind) for n, x in vars(made).items() if isinstance(x, torch.Tensor)}
            return replace(made, **tensors)

        blocks, sequences = on(PLAIN.blocks(TARGET)), on(PLAIN.sequences())
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

    for name in ("empty", "empty_like"):
        setattr(torch, name, partial(recorded, getattr(torch, name)))
    torch.cuda.device = made_current
    torch.cuda.get_device_name = lambda device: "an absent GPU"
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    give_kernels_to(lambda kernel, *given: seen.append([kernel.name, current[0], given[3], id(kernel)]))
    driver.set_active(TwoGPUs(TARGET))
    found = []
    for gpu, kind in ((0, OnFirst), (0, OnSecond), (1, OnSecond)):
        current[0], entered, seen = gpu, [], []
        call(kind)
        found.append({"entered": entered, "seen": seen, "after": current[0]})
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # those of this process are not in a fork of it
    found = {}
    for function in (twice, growing, on_devices):
        with get_context("fork").Pool(1) as pool:
            found[function.__name__] = pool.apply(function)
    sys.stdout.write(json.dumps(found))
