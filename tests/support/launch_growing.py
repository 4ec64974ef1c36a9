"""Serve growing batches with widening block tables on a GPU that is absent; print what it costs.

A script for `test_launch.py`: nothing is compiled, but everything that would be is counted.
"""

import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import torch
from kernels.offline import launches, pretend
from kernels.variants import VARIANTS
from triton.runtime.jit import JITFunction

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.kernels.append_kv import append_kv
from fp8kv_runtime.kernels.decode import decode_attention
from fp8kv_runtime.kernels.extend import extend_attention
from fp8kv_runtime.kernels.targets import TARGETS

asked = []


class Compiled:
    """Stands for a compiled kernel that is launched without Triton."""

    def __getitem__(self, grid):
        return lambda *arguments: None


def ask(self, *arguments, **options):
    """Stand for Triton's search for a compiled kernel."""
    asked.append(self.fn.__name__)
    return Compiled()


def serve():
    """Every batch of up to 64 sequences, with tables of 1 to 64 blocks."""
    variant = next(v for v in VARIANTS if v.name == "plain-64")
    blocks, options, splits = variant.blocks(target), variant.options(), variant.num_splits
    for num_seqs in range(1, 65):
        lengths = torch.full((num_seqs,), 64 * num_seqs, dtype=torch.int32)
        sequences = PagedSequences(torch.zeros(num_seqs, num_seqs, dtype=torch.int32), lengths)
        query = torch.zeros(num_seqs, 32, 64, dtype=torch.float16)
        new = torch.zeros(num_seqs, 8, 64, dtype=torch.float16)
        ends = torch.arange(num_seqs + 1, dtype=torch.int32)
        decode_attention(query, blocks, sequences, options)
        for parts in (None, splits):
            extend_attention(query, blocks, sequences, ends, 1, options, num_splits=parts)
        append_kv(new, new, blocks, torch.zeros(num_seqs, dtype=torch.int64))


target = TARGETS["sm_90"]
# by what Triton would compile for, then by what our launchers tell apart
compiled = [launch.kernel for launch in set(launches(target, serve))]
JITFunction.run = ask
with pretend(target):
    serve()
found = {name: {"compiled": compiled.count(name), "asked": asked.count(name)} for name in asked}
sys.stdout.write(json.dumps(found))
