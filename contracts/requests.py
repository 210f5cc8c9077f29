"""A validated and tokenized client request."""

from __future__ import annotations

import enum

import msgspec


class Priority(enum.IntEnum):
    """Priority class, lower first: LS (latency-sensitive) work preempts BE (best-effort) work."""

    LS = 0
    BE = 1

    @property
    def label(self) -> str:
        return self.name.lower()


GREEDY_BELOW = 1e-5  # lower temperatures choose the most probable token


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters and end conditions. Limits: sampling_limits.py.

    A temperature below GREEDY_BELOW is greedy; top_k 0 means no limit. presence_penalty and
    frequency_penalty apply to generated tokens, repetition_penalty to the prompt as well. Tokens
    that end the sequence, stop_token_ids included, are not chosen before min_tokens. choices: the
    generated tokens are one of these, and the sequence ends with it.
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
    logprobs: int | None = None  # alternatives per generated token; None: no log-probabilities

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits of the next one."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def modifies_logits(self) -> bool:
        """True if tokens are sampled from other logits than the model's."""
        return bool(
            self.has_penalties or self.logit_bias or self.min_tokens or self.choices is not None
        )


class Caller(msgspec.Struct, frozen=True, array_like=True):
    """Origin of a sequence. Callers take turns and find only their own blocks in a prefix cache.

    tenant: name of the API key's tenant that does not reveal the key (b"": none, or a bulk job).
    request: the client request, unique at its ingress. salt: parent of the first block's hash.
    name: the client's x-request-id, for logs and traces.
    """

    tenant: bytes = b""
    request: int = 0
    salt: bytes = b""
    name: str = ""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
