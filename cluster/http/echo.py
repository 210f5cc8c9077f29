"""`echo`: a prompt given back, with the log-probability of each of its tokens if wanted.

A prompt may be as long as the context, and have as many alternatives per token as the API allows:
all that is done for each token is done a slice of them at a time, and others get their turn in
between.
"""

from __future__ import annotations

import array
import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from cluster.http.request_context import AppState
from cluster.http.schemas import GenerationOptions
from cluster.http.text import Delta, ShownToken
from contracts.messages import Scored, Submit, TokenLogprob
from contracts.requests import Caller, Usage

SLICE_TOKENS = 256


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that can be given back, to several choices. scored: None where no log-probability is
    wanted. offsets: where in the text each token begins. reason: set if nothing is generated."""

    text: str
    token_ids: list[int]
    offsets: Sequence[int] = ()
    scored: Scored | None = None
    reason: str | None = None
    usage: Usage

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        if self.scored is None:
            yield Delta(self.text, [], self.reason)
            return
        count = len(self.token_ids)
        for start in range(0, count, SLICE_TOKENS):
            end = start + SLICE_TOKENS
            if start:
                await asyncio.sleep(0)
            is_last = end >= count
            text_end = len(self.text) if is_last else self.offsets[end]
            text = self.text[self.offsets[start] if start else 0 : text_end]
            yield Delta(
                text, self._tokens(self.scored, start, end), self.reason if is_last else None
            )

    def _tokens(self, scored: Scored, start: int, end: int) -> list[ShownToken]:
        """Nothing comes before the first token: it has no log-probability, and `scored` begins with
        the second."""
        values, tops = scored.token_logprobs or [], scored.token_tops
        tokens = []
        for index in range(start, min(end, len(self.token_ids))):
            logprob = None
            if index:
                top = [] if tops is None else tops[index - 1]
                logprob = TokenLogprob(values[index - 1], top)
            tokens.append(ShownToken(self.token_ids[index], self.offsets[index], logprob))
        return tokens


async def echo(
    app_state: AppState,
    text: str,
    token_ids: list[int],
    options: GenerationOptions,
    caller: Caller,
    *,
    wait_for_slot: bool,
) -> Echo:
    """The prompt, scored if log-probabilities are wanted. caller: whose it is. patient: as in
    `Backend.score`."""
    reason = "length" if options.max_tokens == 0 else None
    top = options.sampling.logprobs
    if top is None:
        usage = Usage(prompt_tokens=len(token_ids))
        return Echo(text=text, token_ids=token_ids, reason=reason, usage=usage)
    scored = Scored(0, Usage(prompt_tokens=1), token_logprobs=[])
    if len(token_ids) > 1:
        submit = Submit(
            request_id=0,
            token_ids=token_ids,
            sampling=None,
            priority=options.priority,
            score_from=1,
            score_top=top,
            caller=caller,
        )
        scored = await app_state.backend.score(submit, wait_for_slot=wait_for_slot)
    return Echo(
        text=text,
        token_ids=token_ids,
        offsets=await _offsets(app_state, token_ids),
        scored=scored,
        reason=reason,
        usage=scored.usage,
    )


async def text_of(app_state: AppState, token_ids: list[int]) -> str:
    """All of it, special tokens included."""
    detokenizer = app_state.tokenizer.detokenizer(skip_special_tokens=False)
    texts = []
    for start in range(0, len(token_ids), SLICE_TOKENS):
        texts.append(detokenizer.push(token_ids[start : start + SLICE_TOKENS]))
        await asyncio.sleep(0)
    return "".join([*texts, detokenizer.flush()])


async def _offsets(app_state: AppState, token_ids: list[int]) -> Sequence[int]:
    detokenizer = app_state.tokenizer.detokenizer()
    offsets, offset = array.array("q"), 0
    for index, token_id in enumerate(token_ids):
        offsets.append(offset)
        offset += len(detokenizer.push((token_id,)))
        if index % SLICE_TOKENS == SLICE_TOKENS - 1:
            await asyncio.sleep(0)
    return offsets
