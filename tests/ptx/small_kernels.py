"""Kernels of a few instructions, written by hand."""

import numpy as np
import torch
from virtual_gpu.machine import Machine
from virtual_gpu.memory_access import GlobalMemory
from virtual_gpu.program import parse

_KERNEL = """
.entry small({params}) .reqntid {threads}
{{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .b64 %rd<40>;
    {setup}
    {body}
    ret;
}}
"""
# a thread's place among all, in %r0, and where its value of each size lies, for parameter i
_PLACE = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.s32 %r0, %r1, {threads}, %r2;"
_POINTER = "ld.param.b64 %rd{i}, [small_param_{i}]; mad.wide.s32 %rd{i}, %r0, {size}, %rd{i};"


def run(body: str, *tensors: torch.Tensor, threads=32, programs=1, shared=0) -> None:
    """Run with %rd0 .. pointing to each thread's own value of every tensor, in parameter order."""
    setup = [_PLACE.format(threads=threads)]
    for i, tensor in enumerate(tensors):
        size = tensor.element_size() * tensor.numel() // (threads * programs)
        setup.append(_POINTER.format(i=i, size=size))
    params = ", ".join(f".param .u64 small_param_{i}" for i in range(len(tensors)))
    text = _KERNEL.format(params=params, threads=threads, setup="".join(setup), body=body)
    pointers = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    memory = GlobalMemory(tensors)
    Machine(parse(text), (programs, 1, 1), pointers.view(np.uint8), memory, shared).run()


def elementwise(body: str, out: torch.dtype, *tensors: torch.Tensor) -> torch.Tensor:
    """What `body` leaves in %d, of a value of each tensor in %a, %b and %c."""
    result = torch.empty(len(tensors[0]), dtype=out)
    names = dict(zip("dabc", (result, *tensors), strict=False))
    kinds = {name: f"b{8 * tensor.element_size()}" for name, tensor in names.items()}
    registers = "".join(f".reg .{kind} %{name};" for name, kind in kinds.items())
    loads = [f"ld.global.{kinds[x]} {{ %{x} }}, [ %rd{i} + 0 ];" for i, x in enumerate(names) if i]
    store = f"st.global.{kinds['d']} [ %rd0 + 0 ], {{ %d }};"
    threads = min(256, len(result))
    text = f"{registers} {' '.join(loads)} {body} {store}"
    run(text, result, *tensors, threads=threads, programs=-(-len(result) // threads))
    return result
