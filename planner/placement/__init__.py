"""Which rank holds which experts, and which slot answers a (token, expert) pair."""
