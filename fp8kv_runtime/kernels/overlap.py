"""Programmatic dependent launch: a kernel that starts while the one before it still runs.

NVIDIA's since Hopper (PTX ISA, `griddepcontrol`); elsewhere both functions do nothing.
"""

from typing import Any

import triton
import triton.language as tl

from fp8kv_runtime.kernels.targets import Target


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """From here on the next kernel may start, as far as there is room."""
    if OVERLAPS:
        _let_next_start()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if OVERLAPS:
        _wait_for_previous()


@triton.jit
def _let_next_start():
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def _wait_for_previous():
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


def overlapping(target: Target) -> dict[str, Any]:
    """Launch options of a kernel that calls `wait_for_previous`."""
    return {"launch_pdl": True} if target.overlaps else {}
