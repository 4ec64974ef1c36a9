"""Launching kernels: what a layer fixes is found once, and so is the compiled kernel.

Triton finds the compiled kernel anew for every launch, from all arguments and constants: with as
many as ours that takes longer than a short kernel runs. `benchmarks/launch_cost.py` measures it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.kernels.targets import Target
from fp8kv_runtime.kernels.tuning import query_is_whole
from fp8kv_runtime.options import AttentionOptions
from fp8kv_runtime.storage import BlocksLayout, KVBlocks, scale_dims, specialization


class Layer(NamedTuple):
    """What the constants of an attention kernel depend on, besides the target."""

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
    ) -> "Layer":
        """Collect what the constants depend on."""
        return cls(
            query.shape[1],
            query.dtype,
            blocks.layout,
            None if options.q_scale is None else scale_dims(options.q_scale),
            options.sliding_window or 0,
            options.softcap is not None,
            options.sinks is not None,
            sequences.seq_starts is not None,
        )


def layer_constants(layer: Layer, target: Target) -> dict[str, Any]:
    """Compile-time constants of an attention kernel that the layer and its options fix."""
    blocks = layer.blocks
    return {
        "NUM_KV_HEADS": blocks.num_kv_heads,
        "GROUP": layer.num_heads // blocks.num_kv_heads,
        "HEAD_DIM": blocks.head_dim,
        # a matrix instruction takes 32 bytes of every row, from even and odd channels apart
        "BLOCK_D": max(64, triton.next_power_of_2(blocks.head_dim)),
        "BLOCK_SIZE": blocks.block_size,
        "K_SCALES": blocks.k_scales,
        "Q_SCALES": layer.q_scales or 0,
        "WINDOW": layer.window,
        "SOFTCAP": layer.softcap,
        # softmax does not see what a centre takes from every score alike
        "HAS_CENTER": blocks.has_center and (layer.sinks or layer.softcap),
        "HAS_SINKS": layer.sinks,
        "HAS_STARTS": layer.starts,
        "Q_FP8": layer.q_scales is not None,
        "Q_REST": not query_is_whole(layer.dtype, blocks),
        "P_REST": layer.dtype == torch.float32,
        "FORMAT": blocks.format,
        "HARDWARE": blocks.format in target.decoded,
        "PTX": target.backend == "cuda",
        "ENCODES": blocks.format in target.encoded,
        "MULTIPLIES": blocks.format in target.multiplied,
    }


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
        self, target: Target, grid: tuple[int, int, int], blocks: KVBlocks, given: Sequence[Any],
        arguments: Sequence[Any],
    ) -> None:  # fmt: skip
        """Launch with `arguments`: every non-constant argument, in the kernel's order.

        Of them, `given` are what a caller hands in; the others are of `blocks`, or allocated here.
        """
        if target.backend != "cuda":  # AMD compiles for the size of tensors, too
            self.kernel[grid](*arguments, **self.constants, **self.options)
            return
        key = (blocks.specialization, *map(specialization, given))
        compiled = self._compiled.get(key)
        if compiled is None:
            made = self.kernel[grid](*arguments, **self.constants, **self.options)
            if made is not None:  # nothing is where it was only to be recorded
                self._compiled[key] = made
        else:
            compiled[grid](*arguments, *self._ordered)
