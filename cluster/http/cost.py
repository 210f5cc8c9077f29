"""The cost of a request, estimated before it is built, and the memory budget of all open requests.

    body ── characters ── tokens ── passes x tokens ── alternatives ── bytes of the answer
            known at once  once tokenized              (log-probabilities)

Each quantity is checked as soon as it is known, against the configuration's section `limits` and
the model's context. A request's account is charged before memory is allocated: for the body, the
decoded body, tokens, scores and the answer. It is closed when the answer is sent or the request
ends otherwise. Sizes of Python objects are those of 64-bit CPython 3.11 to 3.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from contracts.config import LimitsConfig
from contracts.errors import OverloadError, TooCostlyError, TooLongError

# Memory in the ingress, in bytes.
TOKEN_BYTES = 40  # a list entry and its int
SHARED_TOKEN_BYTES = 8  # a list entry whose int is shared
SCORED_TOKEN_BYTES = 96  # of `Scored`: a float, a list of alternatives
ALTERNATIVE_BYTES = 128  # a pair of int and float
VALUE_BYTES = 40  # of decoded JSON: a number, a short string
CONTAINER_BYTES = 64  # of decoded JSON: a list or an object without its values
_PLAIN = bytes(set(range(256)) - set(b"[{,:\\"))  # bytes that do not count as structure
WIDEST_CHARACTER_BYTES = 4

# An answer as JSON, in bytes.
ANSWER_TOKEN_BYTES = 8  # its text
ANSWER_NUMBER_BYTES = 24
COMPLETION_ALTERNATIVE_BYTES = 48  # "text": -12.345678901234567,
CHAT_ALTERNATIVE_BYTES = 112  # {"token": ..., "logprob": ..., "bytes": [...]},
RETRY_AFTER_S = 1.0
BEST_EFFORT = 0.75  # of the budget
STEP_BYTES = 1 << 16


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Cost limits for one model and configuration.

    token_characters: length of the model's longest token.
    """

    context_tokens: int
    token_characters: int
    limits: LimitsConfig = LimitsConfig()

    @property
    def prompt_characters(self) -> int:
        """Upper bound of the characters of a prompt that fits the context."""
        return self.context_tokens * self.token_characters

    def as_dict(self) -> dict[str, int]:
        """Return the limits for clients, named as in the configuration's section `limits`."""
        names = ("passes", "pass_tokens", "label_tokens", "answer_bytes", "request_bytes")
        shown = {name: getattr(self.limits, name) for name in names}
        return {"prompt_characters": self.prompt_characters, **shown}

    def check_text(self, param: str, characters: int) -> None:
        """Check a prompt's length before it is tokenized. Raises TooLongError."""
        if characters > self.prompt_characters:
            raise TooLongError(
                f"{param}: a prompt of {characters} characters cannot fit the model's context of"
                f" {self.context_tokens} tokens, which have at most {self.prompt_characters}"
                " characters together: shorten it",
                param,
            )

    def check_labels(self, labels: Sequence[str]) -> None:
        """Check a lower bound of the labels' tokens. Raises TooCostlyError."""
        tokens = -(-sum(map(len, labels)) // self.token_characters)
        most = self.limits.label_tokens
        if tokens > most:
            raise TooCostlyError(
                f"labels: together they have at least {tokens} tokens, at most {most} are accepted"
                " (limits.label_tokens): give fewer or shorter ones",
                "labels",
            )

    def check_passes(self, param: str, passes: int, tokens: int) -> None:
        """Check the number of sequences and their tokens in all. Raises TooCostlyError."""
        most, most_tokens = self.limits.passes, self.limits.pass_tokens
        if passes > most:
            raise TooCostlyError(
                f"{param}: the request becomes {passes} sequences, at most {most} are accepted"
                " (limits.passes): send it in parts",
                param,
            )
        if tokens > most_tokens:
            raise TooCostlyError(
                f"{param}: the request's sequences have {tokens} tokens in all, at most"
                f" {most_tokens} are accepted (limits.pass_tokens): send it in parts",
                param,
            )

    def check_answer(self, param: str, size: int) -> None:
        """Check the answer's size in bytes. Raises TooCostlyError."""
        most = self.limits.answer_bytes
        if size > most:
            raise TooCostlyError(
                f"{param}: the answer would have about {size} bytes, at most {most} are accepted"
                " (limits.answer_bytes): request less, or send the request in parts",
                param,
            )


def decoded_bytes(body: bytes | bytearray) -> int:
    """Return an upper bound of the memory of a decoded JSON body."""
    marks = body.translate(None, _PLAIN)
    narrow = body.isascii() and not (b"\\" in marks and b"\\u" in body)
    text = len(body) * (1 if narrow else WIDEST_CHARACTER_BYTES)
    containers = marks.count(b"[") + marks.count(b"{")
    values = marks.count(b",") + marks.count(b":") + 1
    return text + containers * CONTAINER_BYTES + values * VALUE_BYTES


def scored_bytes(tokens: int, top: int) -> int:
    """Return the memory of a prompt's scores with `top` alternatives per token."""
    return tokens * (SCORED_TOKEN_BYTES + top * ALTERNATIVE_BYTES)


def generated_answer_bytes(tokens: int, top: int | None, alternative_bytes: int) -> int:
    """Return the size of an answer with `top` alternatives per token.

    top: None: without log-probabilities.
    """
    alternatives = 0 if top is None else top + 1
    return tokens * (ANSWER_TOKEN_BYTES + alternatives * alternative_bytes)


def classified_answer_bytes(texts: int, labels: Sequence[str], *, multi_label: bool) -> int:
    """Return the size of an answer whose rows repeat the best label, or all that apply."""
    sizes = [len(label.encode()) for label in labels]
    named = sum(sizes) if multi_label else max(sizes)
    return texts * (named + len(labels) * ANSWER_NUMBER_BYTES)


class MemoryBudget:
    """Memory of all open requests of an ingress. Belongs to one event loop."""

    def __init__(self, limits: LimitsConfig) -> None:
        self.limits = limits
        self.request_bytes = limits.request_bytes
        self.held_bytes = 0

    def open(self) -> MemoryAccount:
        return MemoryAccount(self)


class MemoryAccount:
    """One request's share of the budget.

    best_effort: charged only up to a part of the budget.
    """

    best_effort = False

    def __init__(self, requests: MemoryBudget) -> None:
        self._requests = requests
        self.held_bytes = 0
        self._small = 0
        self._closed = False

    def charge(self, count: int, param: str | None = None) -> None:
        """Charge `count` bytes, or none if it raises. No effect after `close`.

        Raises TooCostlyError (413) beyond the limit of one request, OverloadError (429) if other
        requests hold the missing memory.
        """
        if self._closed:
            return
        requests, held = self._requests, self.held_bytes + count
        if held > requests.request_bytes:
            what = f"{param}: the request" if param else "the request"
            raise TooCostlyError(
                f"{what} would hold {held} bytes, one may hold {requests.request_bytes}"
                " (limits.open_bytes times limits.request_fraction): send it in parts",
                param,
            )
        total, most = requests.held_bytes + count, requests.limits.open_bytes
        if self.best_effort:
            most = int(BEST_EFFORT * most)
        if total > most:
            raise OverloadError(
                f"open requests would hold {total} bytes, at most {most}"
                f" (limits.open_bytes): try again in {RETRY_AFTER_S:g} s",
                RETRY_AFTER_S,
            )
        self.held_bytes = held
        requests.held_bytes = total

    def grow(self, count: int) -> None:
        """Charge growth in steps of STEP_BYTES."""
        self._small += count
        if self._small >= STEP_BYTES:
            grown, self._small = self._small, 0
            self.charge(grown)

    def release(self, count: int) -> None:
        """Give back at most `count` charged bytes."""
        count = min(count, self.held_bytes)
        self.held_bytes -= count
        self._requests.held_bytes -= count

    def close(self) -> None:
        """Give back everything. May be called again."""
        self._closed = True
        self.release(self.held_bytes)
