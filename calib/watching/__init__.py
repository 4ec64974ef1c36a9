"""Statistics of the traffic, read out of the KV cache of a running engine (`FP8KV_WATCH`)."""
