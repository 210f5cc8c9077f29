"""Token events to text: incremental detokenisation, stop strings, log-probabilities, usage.

Stop strings. A stop that could still be completed is held back, so that no part of it is shown:

    decoded     The answer is 42.\\n\\nQues          stop "\\n\\nQuestion"
    shown       The answer is 42.                  held "\\n\\nQues"

The stop that is *completed first* ends the text, and among those the one that began first: so the
result does not depend on how the tokens arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import msgspec

from contracts.messages import Finished, TokenLogprob, Tokens
from contracts.requests import Usage
from models.text.tokenizer import Tokenizer


class StopStrings:
    """Lets text through up to the first stop. Pure; linear in the text for given stops."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, text: str, *, may_end: bool = True) -> str:
        """What may be shown now. After a hit, nothing. may_end: a stop that `text` completes is a
        hit; else it is text like any other."""
        if self.hit:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        ends = may_end and [
            (at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0
        ]
        if ends:
            self.hit = True
            self._held = ""
            return buffer[: min(ends)[1]]
        keep = max(_partial_match(buffer, stop) for stop in self._stops)
        shown, self._held = buffer[: len(buffer) - keep], buffer[len(buffer) - keep :]
        return shown

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _partial_match(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class ShownToken(msgspec.Struct, frozen=True):
    """A token with its log-probability, and where in the text it begins (in characters)."""

    token_id: int
    offset: int
    logprob: TokenLogprob | None


class Delta(msgspec.Struct, frozen=True):
    """What one arrival adds. finish_reason: "stop" or "length" with the last one."""

    text: str
    tokens: list[ShownToken]
    finish_reason: str | None = None


class SequenceText:
    """Assembles the text of one generated sequence.

    A token's log-probability is given out with the text that the token begins; tokens that a stop
    string cuts off are not shown but do count in `usage`. Tokens of hidden_ids add no text; they
    are listed, with an empty piece of it, if lists_hidden. A stop string that one of the first
    `stops_after` tokens completes ends nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_tokens: int,
        stops: Sequence[str] = (),
        stops_after: int = 0,
        hidden_ids: Collection[int] = (),
        lists_hidden: bool = False,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(stops)
        self._stops_after = stops_after
        self._hidden_ids = frozenset(hidden_ids)
        self._lists_hidden = lists_hidden
        self._pending: deque[ShownToken] = deque()
        self._decoded = 0
        self._shown = 0
        self._usage = Usage(prompt_tokens=prompt_tokens)
        self.completion_tokens = 0
        self.finished = False

    @property
    def usage(self) -> Usage:
        return msgspec.structs.replace(self._usage, completion_tokens=self.completion_tokens)

    def push(self, events: Sequence[Tokens | Finished]) -> Delta:
        """The delta of one arrival. With a finish_reason nothing more is to be pushed."""
        pieces: list[str] = []
        for event in events:
            if isinstance(event, Finished):
                self._usage = event.usage
                self.completion_tokens = event.usage.completion_tokens
                return self._finish(pieces, event.reason)
            if event.cached_tokens is not None:
                self._usage = msgspec.structs.replace(
                    self._usage, cached_tokens=event.cached_tokens
                )
            if self._take(event, pieces):
                return self._finish(pieces, "stop")
        return self._delta(pieces, None)

    def _take(self, event: Tokens, pieces: list[str]) -> bool:
        """Adds the event's tokens, one by one: usage must not depend on how they were batched.
        True once a stop string is complete."""
        for index, token_id in enumerate(event.token_ids):
            self.completion_tokens += 1
            is_hidden = token_id in self._hidden_ids
            if self._lists_hidden or not is_hidden:
                logprob = event.logprobs[index] if event.logprobs else None
                self._pending.append(ShownToken(token_id, self._decoded, logprob))
            if is_hidden:
                continue
            self._add(self._detokenizer.push((token_id,)), pieces)
            if self._stops.hit:
                return True
        return False

    def _add(self, decoded: str, pieces: list[str]) -> None:
        self._decoded += len(decoded)
        may_end = self.completion_tokens > self._stops_after
        pieces.append(self._stops.push(decoded, may_end=may_end))

    def _finish(self, pieces: list[str], reason: str) -> Delta:
        """The last delta. The flushed rest may itself complete a stop."""
        self.finished = True
        if not self._stops.hit:
            self._add(self._detokenizer.flush(), pieces)
            pieces.append(self._stops.flush())
        if self._stops.hit:
            reason = "stop"
        return self._delta(pieces, reason)

    def _delta(self, pieces: list[str], reason: str | None) -> Delta:
        text = "".join(pieces)
        self._shown += len(text)
        everything = reason is not None and not self._stops.hit
        tokens = []
        while self._pending and (everything or self._pending[0].offset < self._shown):
            tokens.append(self._pending.popleft())
        return Delta(text, tokens, reason)
