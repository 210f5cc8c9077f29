"""Servers, groups, checkpoints and yardsticks that benchmarks share."""
