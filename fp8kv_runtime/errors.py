"""Errors of the runtime, and those of a model's code.

A module of its own, because kernels and the bridge to transformers raise them.
"""

# what a model's code raises where an input, a mask or a cache does not fit it, or cannot be read now: also
# CUDA's errors, torch.AcceleratorError, which are a RuntimeError
MISFITS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError)


class AttentionError(ValueError):
    """A model, cache, mask, scales or tuning table that the runtime or its backend cannot use."""
