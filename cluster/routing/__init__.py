"""Routing from the ingress to the ranks: connections, placement, admission."""
