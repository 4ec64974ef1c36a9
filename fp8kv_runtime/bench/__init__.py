"""Kernels on this machine: right first, then how fast, and with which configs they are fastest."""
