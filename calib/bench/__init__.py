"""`fp8kv bench`: the kernels at a model's shape, right first, then how fast."""
