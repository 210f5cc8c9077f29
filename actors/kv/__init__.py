"""Ownership and contents of the blocks of the KV pool."""
