"""Triton kernels. Imported only when a kernel is about to run."""
