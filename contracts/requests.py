"""A validated and tokenized client request, its limits, and the hashes of its KV blocks."""

from __future__ import annotations

import array
import enum
import hashlib
from collections.abc import Collection, Sequence

import msgspec

from contracts.errors import RequestError

INT64 = 1 << 63
MAX_LOGPROBS = 20
MAX_BIASES = 1024  # entries of logit_bias
MAX_BIAS = 100.0
MAX_STOP_TOKENS = 128
MAX_CHOICES = 256
MAX_GRAMMAR_CHARACTERS = 1 << 19  # of a serialised grammar
MAX_CHOICE_TOKENS = 2048  # of all choices together: a trie of some 0.6 MB per running sequence

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Raise RequestError for the first field out of range. For lengths see `check_lengths`."""
    for name, (low, high) in RANGES.items():
        value = getattr(sampling, name)
        if not low <= value <= high:  # nor is NaN
            raise RequestError(f"{name}={value} must be within {low} and {high}", name)
    if not 0 < sampling.top_p <= 1:
        raise RequestError(f"top_p={sampling.top_p} must be above 0 and at most 1", "top_p")
    check_integer("top_k", sampling.top_k, 0, INT64 - 1)
    if sampling.seed is not None:
        check_integer("seed", sampling.seed, -INT64, INT64 - 1)
    if sampling.logprobs is not None:
        check_integer("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    check_integer("min_tokens", sampling.min_tokens, 0, INT64 - 1)
    _check_biases(sampling.logit_bias or {}, vocabulary)
    _check_count("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKENS, "token ids")
    check_ids("stop_token_ids", sampling.stop_token_ids, vocabulary)
    _check_count("grammar", sampling.grammar or "", MAX_GRAMMAR_CHARACTERS, "characters")
    if sampling.choices is not None:
        _check_choices(sampling.choices, vocabulary)


def check_lengths(sampling: Sampling) -> None:
    """Raise RequestError if max_tokens is below min_tokens or below the longest choice."""
    most = sampling.max_tokens
    if sampling.min_tokens > most:
        raise RequestError(
            f"min_tokens={sampling.min_tokens} is more than max_tokens={most}: lower it, or raise "
            "max_tokens",
            "min_tokens",
        )
    longest = max(map(len, sampling.choices or ()), default=0)
    if longest > most:
        raise RequestError(
            f"max_tokens={most} is less than the {longest} tokens of the longest choice: raise it, "
            "or shorten that choice",
            "max_tokens",
        )


def check_integer(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"{name}={value} must be within {low} and {high}", name)


def check_ids(name: str, token_ids: Collection[int], vocabulary: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocabulary):
        raise RequestError(f"{name}: ids must be from 0 to {vocabulary - 1}", name)


def _check_count(name: str, entries: Collection[object], most: int, what: str) -> None:
    if len(entries) > most:
        raise RequestError(f"{name} has {len(entries)} {what}, at most {most}", name)


def _check_biases(biases: dict[int, float], vocabulary: int) -> None:
    name = "logit_bias"
    _check_count(name, biases, MAX_BIASES, "entries")
    check_ids(name, biases, vocabulary)
    for token, bias in biases.items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise RequestError(
                f"{name}: {bias} of token {token} must be within {-MAX_BIAS:g} and {MAX_BIAS:g}",
                name,
            )


def _check_choices(choices: Sequence[Sequence[int]], vocabulary: int) -> None:
    name = "choices"
    _check_count(name, choices, MAX_CHOICES, "choices")
    if not choices or not all(choices):
        raise RequestError(f"{name}: at least one, and each of at least one token", name)
    tokens = sum(map(len, choices))
    if tokens > MAX_CHOICE_TOKENS:
        raise RequestError(f"{name} have {tokens} tokens, at most {MAX_CHOICE_TOKENS}", name)
    for choice in choices:
        check_ids(name, choice, vocabulary)


DIGEST_BYTES = 16


def chain_hashes(
    token_ids: Sequence[int], block_tokens: int, *, known: Sequence[bytes] = (), salt: bytes = b""
) -> list[bytes]:
    """Return one digest per full block of `token_ids`.

    known: digests of the first blocks. salt: empty, or DIGEST_BYTES long.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else salt
    for start in range(len(hashes) * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        block = array.array("q", token_ids[start : start + block_tokens])
        parent = hashlib.blake2b(parent + block.tobytes(), digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes


class Priority(enum.IntEnum):
    """Priority class, lower first: LS (latency-sensitive) work preempts BE (best-effort) work."""

    LS = 0
    BE = 1

    @property
    def label(self) -> str:
        return self.name.lower()


GREEDY_BELOW = 1e-5  # lower temperatures choose the most probable token


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters and end conditions. Limits: `check_sampling`.

    A temperature below GREEDY_BELOW is greedy; top_k 0 means no limit. presence_penalty and
    frequency_penalty apply to generated tokens, repetition_penalty to the prompt as well. Tokens
    that end the sequence, stop_token_ids included, are not chosen before min_tokens. choices: the
    generated tokens are one of these, and the sequence ends with it. grammar: the generated text
    matches this grammar of models/text/grammar.py, and the sequence ends with it.
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
    grammar: str | None = None
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
        return bool(self.has_penalties or self.logit_bias or self.min_tokens or self.has_structure)

    @property
    def has_structure(self) -> bool:
        """True if choices or a grammar restrict the answer."""
        return self.choices is not None or self.grammar is not None


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


def add_usage(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )
