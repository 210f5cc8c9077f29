"""Metrics and task spans of a process."""
