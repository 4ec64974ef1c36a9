"""KV cache types that engines offer: what they cost, who serves them, what they do to K and V."""
