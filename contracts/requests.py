"""What a client asks for, once validated and tokenised."""

from __future__ import annotations

import enum

import msgspec


class Priority(enum.IntEnum):
    """LS (latency-sensitive) work overtakes BE (best-effort) work. Lower goes first."""

    LS = 0
    BE = 1

    @property
    def label(self) -> str:
        return self.name.lower()


GREEDY_BELOW = 1e-5  # a temperature below it takes the likeliest token


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. A temperature below GREEDY_BELOW is greedy; top_k 0 means no
    limit."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives per generated token; None: none at all


class Caller(msgspec.Struct, frozen=True, array_like=True):
    """Whose a sequence is. Callers take turns, and find only their own blocks in a prefix cache.

    tenant: names the API key, without telling it (b"": none, or a bulk job). request: the client
    request that it belongs to, unique at its ingress. salt: the parent of its first block's hash.
    """

    tenant: bytes = b""
    request: int = 0
    salt: bytes = b""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
