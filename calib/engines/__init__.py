"""Engines: a file for each about what its loader does with KV scales, and a simulation that follows it."""
