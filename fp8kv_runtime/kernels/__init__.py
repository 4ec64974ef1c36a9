"""Triton kernels of the runtime; each launcher has a reference of the same name and signature."""
