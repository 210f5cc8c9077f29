"""A decoder layer's attention half, the KV pool, and the model in one process."""
