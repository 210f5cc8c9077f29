"""Benchmarks, one module each: see `python -m benchmarks --list`."""
