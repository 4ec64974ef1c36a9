"""Launching kernels: a layer's constants are found once, and so is the compiled kernel.

Triton finds the compiled kernel anew for every launch, from all arguments and constants: with as
many as ours that takes longer than a short kernel runs. `benchmarks/launch_cost.py` measures it.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.kernels.targets import INTERPRETER, Target, find_target
from fp8kv_runtime.kernels.tuning import query_is_whole
from fp8kv_runtime.options import AttentionOptions
from fp8kv_runtime.storage import BlocksLayout, KVBlocks, scale_dims, specialization


def current_target() -> Target:
    """Return the target that Triton launches kernels on now."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return INTERPRETER
    active = driver.active
    return _target_on(active, active.get_current_device())


def is_elsewhere(tensor: Tensor) -> bool:
    """Return whether a tensor, of any shape, lies on another GPU than Triton launches kernels on now."""
    device = tensor.device
    return device.type == "cuda" and device.index != driver.active.get_current_device()


@functools.cache
def _target_on(active: Any, device: Any) -> Target:
    target = active.get_current_target()
    return find_target(target.backend, target.arch)


class AttentionLayer(NamedTuple):
    """Facts on which the constants of an attention kernel depend, besides the target."""

    num_heads: int
    dtype: torch.dtype  # of the query
    blocks: BlocksLayout
    q_scales: int | None  # as `scale_dims`; None: 16-bit queries
    window: int
    softcap: bool
    sinks: bool
    starts: bool

    @classmethod
    def of(
        cls, query: Tensor, blocks: KVBlocks, sequences: PagedSequences, options: AttentionOptions
    ) -> "AttentionLayer":
        """Collect the facts from the arguments of an attention call; `query` is [T, H, D]."""
        q_scales = None if options.q_scale is None else scale_dims(options.q_scale)
        return cls(
            query.shape[1], query.dtype, blocks.layout, q_scales, options.sliding_window or 0,
            options.softcap is not None, options.sinks is not None, sequences.seq_starts is not None,
        )  # fmt: skip


class Constants(SimpleNamespace):
    """Compile-time constants that a layer fixes: the argument LAYER of every kernel."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


def block_constants(blocks: BlocksLayout, target: Target, **attention: Any) -> Constants:
    """Return the constants that a layer's blocks fix, in every kernel, and those of `attention`."""
    values = {
        "num_kv_heads": blocks.num_kv_heads,
        "head_dim": blocks.head_dim,
        "width": triton.next_power_of_2(blocks.head_dim),
        "block_size": blocks.block_size,
        "k_scales": blocks.k_scales,  # 0 for one scale per tensor, 1 per head, 2 per channel
        "v_scales": blocks.v_scales,
        "format": blocks.format,
        "hardware": blocks.format in target.decoded,
        "encodes": blocks.format in target.encoded,
        **attention,
    }
    # Triton 3.6 hands only these on to other functions, and the interpreter only plain values
    wrap = (lambda value: value) if target.backend == "interpreter" else tl.constexpr
    return Constants(**{name: wrap(value) for name, value in values.items()})


def attention_constants(layer: AttentionLayer, target: Target) -> Constants:
    """Return the constants that a layer and its options fix, in kernels of attention."""
    blocks = layer.blocks
    return block_constants(
        blocks, target,
        num_heads=layer.num_heads,
        group=layer.num_heads // blocks.num_kv_heads,
        # a matrix instruction takes 32 bytes of every row, from even and odd channels apart
        block_d=max(64, triton.next_power_of_2(blocks.head_dim)),
        q_scales=layer.q_scales or 0,
        window=layer.window,  # 0: none
        softcap=layer.softcap,
        # softmax does not see what a centre takes from every score alike
        has_center=blocks.has_center and (layer.sinks or layer.softcap),
        has_sinks=layer.sinks,
        has_starts=layer.starts,
        q_fp8=layer.q_scales is not None,
        splits_query=not query_is_whole(layer.dtype, blocks),
        splits_weights=layer.dtype == torch.float32,
        ptx=target.backend == "cuda",
        multiplies=blocks.format in target.multiplied,
        overlaps=target.overlaps,
    )  # fmt: skip


class Launcher:
    """A kernel with its constants and options."""

    def __init__(self, kernel: Any, constants: Mapping[str, Any], *, num_warps: int, **options: Any) -> None:
        self.kernel = kernel
        self.options = {"num_warps": num_warps, **options}
        self.constants = constants
        names = getattr(kernel, "arg_names", ())
        self._ordered = tuple(constants[name] for name in names if name in constants)
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, target: Target, grid: tuple[int, int, int], blocks: KVBlocks, inputs: Sequence[Any],
        arguments: Sequence[Any],
    ) -> None:  # fmt: skip
        """Launch with `arguments`: every non-constant argument, in the kernel's order.

        Of them, `inputs` come from a caller; the others are of `blocks`, or allocated here.
        """
        if target.backend != "cuda":  # AMD compiles for the size of tensors, too
            self.kernel[grid](*arguments, **self.constants, **self.options)
            return
        key = (blocks.specialization, *map(specialization, inputs))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self.kernel[grid](*arguments, **self.constants, **self.options)
            if compiled is not None:  # nothing is where it was only to be recorded
                self._compiled[key] = compiled
        else:
            compiled[grid](*arguments, *self._ordered)
