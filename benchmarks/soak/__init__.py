"""Hours of good, bad, huge, slow and vanishing clients against one server."""
