"""Measurements; each result is a JSON file with its samples."""
