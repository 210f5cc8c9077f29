"""Which prefill worker takes a request: prefixes, work, saturation."""
