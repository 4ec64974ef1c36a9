"""Capture of K, V and Q while a model runs: observed, added up, resumed, shared between processes."""
