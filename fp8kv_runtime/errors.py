"""What can go wrong when a model meets the FP8 cache."""


class AttentionError(ValueError):
    """A model, cache, mask, scales or tuning table that the runtime or its backend cannot use."""
