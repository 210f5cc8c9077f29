"""The HTTP API and its server."""
