"""Mutated requests, by the million, against the API in process."""
