"""Routing of requests to prefill workers: prefixes, work, saturation."""
