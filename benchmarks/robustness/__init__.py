"""Faults of every kind under mixed load, and what becomes of every answer."""
