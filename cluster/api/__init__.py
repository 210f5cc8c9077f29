"""The HTTP interface: OpenAI-compatible requests in, text and probabilities out."""
