"""Policies of an operator's own."""
