"""Blocks of the KV pool: who holds which, and what is in them."""
