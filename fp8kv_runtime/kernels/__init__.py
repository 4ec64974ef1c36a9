"""Triton kernels of the runtime; launchers that compute have a reference of the same name and signature."""
