"""Tensor operations. Each has a slow reference in tests/support/kernel_reference.py."""
