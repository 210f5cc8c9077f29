"""Section `limits`."""

from typing import Annotated

from msgspec import Meta

from contracts.config.section import Count, Section


class LimitsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size limits of a request, and memory limits of all open requests of an ingress.

    Requests above them are rejected with 413, or with 429 if other requests use the memory.
    """

    passes: Count = 65_536
    """Maximum sequences of a request: rows x passes of their labels, or prompts x n."""
    pass_tokens: Count = 1 << 25
    """Maximum tokens of all sequences of a request, including tokens to generate. A prompt is also
    limited to the characters of a full context of the longest tokens."""
    label_tokens: Count = 65_536
    """Maximum tokens of all labels of a classification request."""
    answer_bytes: Annotated[int, Meta(ge=1 << 10, le=128 << 20)] = 64 << 20
    """Maximum estimated bytes of a JSON response; log-probabilities are most of it."""
    open_bytes: Annotated[int, Meta(ge=1 << 20)] = 512 << 20
    """Maximum bytes held by all open requests: bodies, texts, tokens, scores, responses."""
    request_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Maximum fraction of open_bytes for one request."""
    tokenizing_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    """Threads that tokenize long texts in chunks; requests take turns."""

    @property
    def request_bytes(self) -> int:
        """Maximum bytes held by one request."""
        return int(self.open_bytes * self.request_fraction)
