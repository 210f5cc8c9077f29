"""Decoder halves, checkpoints and the KV pool."""
