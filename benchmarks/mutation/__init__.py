"""Mutants of the pure packages and planted protocol bugs, run against the tests."""
