"""Expert placement: the experts of each rank, and the slot that serves a (token, expert) pair."""
