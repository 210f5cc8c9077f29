"""LS beside BE: our policies beside those of others, on the same ranks."""
