"""Kernels of a few instructions, written by hand."""

import numpy as np
import torch
from virtual_gpu.machine import Machine
from virtual_gpu.memory_access import GlobalMemory
from virtual_gpu.program import parse

REGISTERS = ".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .b64 %rd<40>;"


def run(body, *tensors, threads=32, programs=1, shared=0):
    """Run with a thread's place in %r0, and %rd0 .. pointing to its own value of every tensor."""
    setup = f"mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.s32 %r0, %r1, {threads}, %r2;"
    for i, tensor in enumerate(tensors):
        size = tensor.element_size() * tensor.numel() // (threads * programs)
        setup += f"ld.param.b64 %rd{i}, [small_param_{i}]; mad.wide.s32 %rd{i}, %r0, {size}, %rd{i};"
    params = ", ".join(f".param .u64 small_param_{i}" for i in range(len(tensors)))
    text = f".entry small({params}) .reqntid {threads}\n{{ {REGISTERS} {setup} {body} ret; }}\n"
    pointers = np.array([tensor.data_ptr() for tensor in tensors], np.uint64).view(np.uint8)
    Machine(parse(text), (programs, 1, 1), pointers, GlobalMemory(tensors), shared).run()


def elementwise(body, out, *tensors):
    """What `body` leaves in %d, of a value of each tensor in %a, %b and %c."""
    result = torch.empty(len(tensors[0]), dtype=out)
    names = dict(zip("dabc", (result, *tensors), strict=False))
    kinds = {name: f"b{8 * tensor.element_size()}" for name, tensor in names.items()}
    registers = "".join(f".reg .{kind} %{name};" for name, kind in kinds.items())
    loads = [f"ld.global.{kinds[x]} {{ %{x} }}, [ %rd{i} + 0 ];" for i, x in enumerate(names) if i]
    store = f"st.global.{kinds['d']} [ %rd0 + 0 ], {{ %d }};"
    threads, body = min(256, len(result)), f"{registers} {' '.join(loads)} {body} {store}"
    run(body, result, *tensors, threads=threads, programs=-(-len(result) // threads))
    return result
