"""Routed experts: router, layout, and the stores that hold their weights."""
