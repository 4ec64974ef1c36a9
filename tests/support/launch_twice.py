"""Launch kernels that an absent GPU would run, a first and a second time; print what they get.

A script for `test_launch.py`: kernels that an interpreter runs are launched in another way.
"""

import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
from kernels.offline import pretend
from kernels.variants import VARIANTS
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from fp8kv_runtime.kernels.append_kv import append_kv
from fp8kv_runtime.kernels.decode import decode_attention
from fp8kv_runtime.kernels.extend import extend_attention
from fp8kv_runtime.kernels.targets import TARGETS

launched = []
found_by_triton = []
find = JITFunction.run


def plain(argument):
    """An argument as text; of memory allocated anew only what it is."""
    if isinstance(argument, torch.Tensor):
        return f"{argument.dtype} {list(argument.shape)}"
    return repr(argument)


def record(kernel):
    """What the driver would be called with."""

    def run(*given):
        grid, arguments = given[:3], given[9:]
        launched.append([kernel.name, id(kernel), list(grid), [plain(each) for each in arguments]])

    return run


def counted(self, *arguments, **options):
    """Triton's own way to the compiled kernel."""
    found_by_triton.append(self.fn.__name__)
    return find(self, *arguments, **options)


JITFunction.run = counted
CompiledKernel.run = property(record)
CompiledKernel._init_handles = lambda self: None
CompiledKernel.launch_metadata = lambda self, *arguments: None
CompiledKernel.function = None

target = TARGETS["sm_90"]
found = {}
with pretend(target):
    for variant in (v for v in VARIANTS if v.name in sys.argv[1:]):
        blocks, options = variant.blocks(target), variant.options()
        heads = (variant.group * 8, variant.head_dim)
        memory = torch.zeros(4 * heads[0] * heads[1] + 1, dtype=variant.dtype)
        aligned, not_aligned = memory[:-1].view(4, *heads), memory[1:].view(4, *heads)
        new = torch.zeros(4, 8, variant.head_dim, dtype=variant.dtype)
        cu_seqlens, slots = torch.arange(5, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
        for query in (aligned, aligned, not_aligned):
            decode_attention(query, blocks, variant.sequences(), options)
            extend_attention(query, blocks, variant.sequences(), cu_seqlens, 1, options)
            append_kv(new, new, blocks, slots)
        found[variant.name] = {"launched": list(launched), "by triton": list(found_by_triton)}
        launched.clear()
        found_by_triton.clear()
sys.stdout.write(json.dumps(found))
