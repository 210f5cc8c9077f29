"""Text of requests and sequences: tokenization in threads, detokenization, stop strings.

Text that may be the beginning of a stop string is held back:

    decoded     The answer is 42.\\n\\nQues          stop "\\n\\nQuestion"
    shown       The answer is 42.                  held "\\n\\nQues"

The stop string that is *completed first* ends the text, and among those the one that began first:
the result does not depend on how the tokens were batched.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TypeVar

import msgspec

from contracts.messages import Finished, TokenLogprob, Tokens
from contracts.requests import Priority, Usage
from models.text.answer_format import partial_match
from models.text.chat_template import Charge, EncodingSteps, finish
from models.text.tokenizer import THREAD_ABOVE_CHARACTERS, Tokenizer

SLICE_TOKENS = 256  # per turn of the event loop
FIRST_MARKER = 0xD800  # lone surrogates, which no decoded text has, stand for hidden tokens


Result = TypeVar("Result")


class StopStrings:
    """Passes text through up to the first stop string. Linear in the text for given stops."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Return the text that may be shown now; nothing after a hit.

        may_end: a stop string that `text` completes is a hit; otherwise it is plain text.
        """
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
        keep = max(partial_match(buffer, stop) for stop in self._stops)
        shown, self._held = buffer[: len(buffer) - keep], buffer[len(buffer) - keep :]
        return shown

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def mark_special(
    stops: Sequence[str], special_texts: Mapping[int, str]
) -> tuple[tuple[str, ...], dict[int, str]]:
    """Return stop strings that also match special tokens, and a marker for each such token.

    A special token has no text in an answer: its marker takes its place while stops are searched.
    """
    marked, markers = list(stops), dict[int, str]()
    for token_id, text in sorted(special_texts.items(), key=lambda item: -len(item[1])):
        if any(text in stop for stop in marked):
            markers[token_id] = chr(FIRST_MARKER + len(markers))
            marked = [stop.replace(text, markers[token_id]) for stop in marked]
    return tuple(dict.fromkeys([*stops, *marked])), markers


class ShownToken(msgspec.Struct, frozen=True):
    """A token with its log-probability and its offset in the text, in characters."""

    token_id: int
    offset: int
    logprob: TokenLogprob | None


class Delta(msgspec.Struct, frozen=True):
    """The additions of one arrival. finish_reason: "stop" or "length" in the last one."""

    text: str
    tokens: list[ShownToken]
    finish_reason: str | None = None


class SequenceText:
    """The text of one generated sequence.

    A token is listed with the text that it begins. Tokens that a stop string cuts off are not
    listed but count in `usage`. Tokens of hidden_ids add no text; they are listed with empty text
    if lists_hidden. A stop string that one of the first `stops_after` tokens completes is plain
    text. stops, markers: from `mark_special`. Special tokens add no text; with shows_tags those of
    the model's answer format do.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int],
        stops: Sequence[str] = (),
        markers: Mapping[int, str] = MappingProxyType({}),
        stops_after: int = 0,
        hidden_ids: Collection[int] = (),
        lists_hidden: bool = False,
        shows_tags: bool = False,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(after=prompt_ids)
        self._tags = tokenizer.tag_texts if shows_tags else {}
        self._markers = markers
        self._unmarked = dict.fromkeys(map(ord, markers.values()))
        self._stops = StopStrings(stops)
        self._stops_after = stops_after
        self._hidden_ids = frozenset(hidden_ids)
        self._lists_hidden = lists_hidden
        self._pending: deque[ShownToken] = deque()
        self._decoded = 0
        self._shown = 0
        self._usage = Usage(prompt_tokens=len(prompt_ids))
        self.completion_tokens = 0
        self.finished = False

    @property
    def usage(self) -> Usage:
        return msgspec.structs.replace(self._usage, completion_tokens=self.completion_tokens)

    def push(self, events: Sequence[Tokens | Finished]) -> Delta:
        """Return the delta of one arrival. A delta with a finish_reason is the last one."""
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
        """Add the event's tokens one by one. Return True once a stop string is complete.

        Usage must not depend on how tokens are batched.
        """
        for index, token_id in enumerate(event.token_ids):
            self.completion_tokens += 1
            is_hidden = token_id in self._hidden_ids
            if self._lists_hidden or not is_hidden:
                logprob = event.logprobs[index] if event.logprobs else None
                self._pending.append(ShownToken(token_id, self._decoded, logprob))
            if is_hidden:
                continue
            decoded, marker = self._detokenizer.push((token_id,)), self._markers.get(token_id, "")
            if marker or token_id in self._tags:  # what the detokenizer holds back precedes it
                decoded += self._detokenizer.flush() + self._tags.get(token_id, "")
            self._add(decoded, pieces, marker)
            if self._stops.hit:
                return True
        return False

    def _add(self, decoded: str, pieces: list[str], marker: str = "") -> None:
        self._decoded += len(decoded)
        may_end = self.completion_tokens > self._stops_after
        pieces.append(self._stops.push(decoded + marker, may_end=may_end))

    def _finish(self, pieces: list[str], reason: str) -> Delta:
        """Return the last delta. The flushed rest may itself complete a stop string."""
        self.finished = True
        if not self._stops.hit:
            self._add(self._detokenizer.flush(), pieces)
            pieces.append(self._stops.flush())
        if self._stops.hit:
            reason = "stop"
        return self._delta(pieces, reason)

    def _delta(self, pieces: list[str], reason: str | None) -> Delta:
        text = "".join(pieces)
        if self._unmarked:
            text = text.translate(self._unmarked)
        self._shown += len(text)
        everything = reason is not None and not self._stops.hit
        tokens = []
        while self._pending and (everything or self._pending[0].offset < self._shown):
            tokens.append(self._pending.popleft())
        return Delta(text, tokens, reason)


class TokenizerPool:
    """Tokenization in threads, a piece at a time, on one event loop.

        request A   [piece] [piece] [piece] ...        each piece is submitted when the previous
        request B           [piece] ...                one is done: requests take turns

    A request whose client disconnects stops after its current piece. Best-effort requests have one
    thread of their own.
    """

    def __init__(self, threads: int) -> None:
        self._pools = {
            Priority.LS: ThreadPoolExecutor(threads, thread_name_prefix="tokenizing"),
            Priority.BE: ThreadPoolExecutor(1, thread_name_prefix="tokenizing-be"),
        }

    async def run(
        self,
        steps: EncodingSteps[Result],
        characters: int,
        charge: Charge,
        priority: Priority = Priority.LS,
    ) -> Result:
        """Return the result of `steps`.

        characters: approximate length of the text; short texts run in the event loop.
        charge: called with the tokens of each step; an error that it raises ends the steps.
        """
        if characters <= THREAD_ABOVE_CHARACTERS:
            return finish(steps, charge)
        found: list[Result] = []

        def collect() -> Iterator[int]:
            found.append((yield from steps))

        pieces, loop = collect(), asyncio.get_running_loop()
        while True:
            tokens = await loop.run_in_executor(self._pools[priority], next, pieces, 0)
            if found:
                return found[0]
            charge(tokens)


async def decode_text(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, complete: bool = True
) -> str:
    """Return the text of `token_ids`, special tokens included.

    complete: False leaves out an unfinished character at the end.
    """
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    texts = []
    for start in range(0, len(token_ids), SLICE_TOKENS):
        texts.append(detokenizer.push(token_ids[start : start + SLICE_TOKENS]))
        await asyncio.sleep(0)
    return "".join([*texts, detokenizer.flush() if complete else ""])
