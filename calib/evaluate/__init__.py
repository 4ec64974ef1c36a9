"""Is an FP8 KV cache as good as 16 bits, and which scales are best? Measured on held-out text."""
