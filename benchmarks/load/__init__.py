"""An open-loop load generator: arrivals are drawn beforehand, and nobody waits for an answer to
send the next request."""
