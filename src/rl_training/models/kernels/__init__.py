"""Kernels for GPUs, which need Triton: nothing imports them where it is missing."""
