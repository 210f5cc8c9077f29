"""The kinds of ranks, and the processes that they run in."""
