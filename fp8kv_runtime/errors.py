"""Errors of the runtime."""


class AttentionError(ValueError):
    """A model, cache, mask, scales or tuning table that the runtime or its backend cannot use."""
