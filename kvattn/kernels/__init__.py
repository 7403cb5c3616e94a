"""Triton kernels, one family a file. They know nothing of the public API."""
