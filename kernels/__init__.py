"""Tensor operations, each with a slow reference beside it."""
