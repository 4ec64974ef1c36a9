"""What can go wrong when a model meets the FP8 cache."""


class AttentionError(ValueError):
    """The model, its cache, its mask or its scales do not fit the FP8 runtime or its backend."""
