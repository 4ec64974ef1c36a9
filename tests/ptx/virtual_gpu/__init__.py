"""Runs compiled PTX without a GPU, all threads at once as numpy arrays.

What is checked on the way, and what is not modelled, is in docs/runtime.md.
"""
