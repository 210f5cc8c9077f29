"""What a request will cost, known before it is built. Pure.

    body ── characters ── tokens ── passes x tokens ── alternatives ── bytes of the answer
            known at once  once tokenised              (what is told of log-probabilities)

Each quantity is checked as soon as it is known, against the configuration's section `limits` and
the model's context: nothing is made of a request that is refused. Sizes of what Python holds are
for CPython 3.11 to 3.13 on 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from contracts.config import LimitsConfig
from contracts.errors import TooCostlyError, TooLongError

# Held by the ingress, in bytes.
TOKEN_BYTES = 40  # an entry of a list, and its int
SHARED_TOKEN_BYTES = 8  # an entry of a list whose int another list has too
SCORED_TOKEN_BYTES = 96  # of a `Scored`: a float, a list of alternatives
ALTERNATIVE_BYTES = 128  # a pair of int and float
VALUE_BYTES = 40  # of decoded JSON: a number, a short string
CONTAINER_BYTES = 64  # of decoded JSON: a list or an object, besides what is in it
_PLAIN = bytes(set(range(256)) - set(b"[{,:\\"))  # says nothing of what a body is made of
WIDEST_CHARACTER_BYTES = 4

# Of an answer as JSON, in bytes.
ANSWER_TOKEN_BYTES = 8  # its text
ANSWER_NUMBER_BYTES = 24
COMPLETION_ALTERNATIVE_BYTES = 48  # "text": -12.345678901234567,
CHAT_ALTERNATIVE_BYTES = 112  # {"token": ..., "logprob": ..., "bytes": [...]},


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model and configuration. token_characters: of the model's longest token."""

    context_tokens: int
    token_characters: int
    limits: LimitsConfig = LimitsConfig()

    @property
    def prompt_characters(self) -> int:
        """No prompt that fits the context has more."""
        return self.context_tokens * self.token_characters

    def as_dict(self) -> dict[str, int]:
        """For clients: names as in the configuration's section `limits`."""
        limits = self.limits
        return {
            "prompt_characters": self.prompt_characters,
            "passes": limits.passes,
            "pass_tokens": limits.pass_tokens,
            "label_tokens": limits.label_tokens,
            "answer_bytes": limits.answer_bytes,
            "request_bytes": limits.request_bytes,
        }

    def check_text(self, param: str, characters: int) -> None:
        """Before it is tokenised, or even put together. Raises TooLongError."""
        if characters > self.prompt_characters:
            raise TooLongError(
                f"{param}: a prompt of {characters} characters cannot fit the model's context of"
                f" {self.context_tokens} tokens, which have at most {self.prompt_characters}"
                " characters together: shorten it",
                param,
            )

    def check_labels(self, labels: Sequence[str]) -> None:
        """Before they are tokenised: they cannot have fewer tokens than this."""
        self.check_label_tokens(-(-sum(map(len, labels)) // self.token_characters))

    def check_label_tokens(self, tokens: int) -> None:
        """Raises TooCostlyError."""
        most = self.limits.label_tokens
        if tokens > most:
            raise TooCostlyError(
                f"labels: together they have at least {tokens} tokens, at most {most} are accepted"
                " (limits.label_tokens): give fewer or shorter ones",
                "labels",
            )

    def check_passes(self, param: str, passes: int, tokens: int) -> None:
        """`passes` sequences of `tokens` tokens in all. Raises TooCostlyError."""
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
        """Raises TooCostlyError."""
        most = self.limits.answer_bytes
        if size > most:
            raise TooCostlyError(
                f"{param}: the answer would have about {size} bytes, at most {most} are accepted"
                " (limits.answer_bytes): ask for less, or send the request in parts",
                param,
            )


def decoded_bytes(body: bytes | bytearray) -> int:
    """At most so much is held of a JSON body once it is decoded."""
    marks = body.translate(None, _PLAIN)  # one walk over the body; what is left is short
    narrow = body.isascii() and not (b"\\" in marks and b"\\u" in body)
    text = len(body) * (1 if narrow else WIDEST_CHARACTER_BYTES)
    containers = marks.count(b"[") + marks.count(b"{")
    values = marks.count(b",") + marks.count(b":") + 1
    return text + containers * CONTAINER_BYTES + values * VALUE_BYTES


def scored_bytes(tokens: int, top: int) -> int:
    """Held of the scores of a prompt with `top` alternatives per token."""
    return tokens * (SCORED_TOKEN_BYTES + top * ALTERNATIVE_BYTES)


def generated_answer_bytes(tokens: int, top: int | None, alternative_bytes: int) -> int:
    """Of `tokens` tokens of text, each with its log-probability and `top` alternatives to it (None:
    without any)."""
    alternatives = 0 if top is None else top + 1
    return tokens * (ANSWER_TOKEN_BYTES + alternatives * alternative_bytes)


def classified_answer_bytes(texts: int, labels: Sequence[str], *, multi_label: bool) -> int:
    """Every row repeats the label that fits best, or all that apply."""
    sizes = [len(label.encode()) for label in labels]
    named = sum(sizes) if multi_label else max(sizes)
    return texts * (named + len(labels) * ANSWER_NUMBER_BYTES)


def scored_answer_bytes(items: int, labels: int) -> int:
    return items * labels * ANSWER_NUMBER_BYTES
