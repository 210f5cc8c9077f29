"""Types that all processes agree on: configuration, requests, plans, messages, errors, metrics."""
