"""The attention half of a decoder and the KV pool."""
