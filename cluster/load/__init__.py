"""Load for a server that speaks OpenAI's API, open loop: arrivals are drawn beforehand, and nobody
waits for an answer to send the next request."""
