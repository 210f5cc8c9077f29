"""Batches of requests from uploaded files."""
