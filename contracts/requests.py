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


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen, and when there is none any more. Limits: sampling_limits.py.

    A temperature below GREEDY_BELOW is greedy; top_k 0 means no limit. presence_penalty and
    frequency_penalty are of generated tokens, repetition_penalty of the prompt's too. Tokens that
    would end the sequence, stop_token_ids among them, are not chosen before there are min_tokens.
    choices: the generated tokens are one of these, and the sequence ends with it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None  # by token id
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    choices: list[list[int]] | None = None
    logprobs: int | None = None  # how many alternatives per generated token; None: none at all

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens have a say in the next one's logits."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def modifies_logits(self) -> bool:
        """Whether a token is chosen by other logits than the model's own."""
        return bool(
            self.has_penalties or self.logit_bias or self.min_tokens or self.choices is not None
        )


class Caller(msgspec.Struct, frozen=True, array_like=True):
    """Whose a sequence is. Callers take turns, and find only their own blocks in a prefix cache.

    tenant: names the API key, without telling it (b"": none, or a bulk job). request: the client
    request that it belongs to, unique at its ingress. salt: the parent of its first block's hash.
    name: what the client calls the request (x-request-id), for logs and traces.
    """

    tenant: bytes = b""
    request: int = 0
    salt: bytes = b""
    name: str = ""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
