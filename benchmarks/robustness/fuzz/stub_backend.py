"""Ranks that compute nothing: plausible answers that follow from the request alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from contracts.messages import Finished, Scored, Submit, TokenLogprob, Tokens
from contracts.requests import Usage

MOST_TOKENS = 4  # of an answer, however many were asked for: the API is what is tried
FIRST_ID, IDS = 60, 400  # tokens of plain text in the bundled tokenizer


class StubBackend:
    """`cluster.http.request_context.Backend`. under_way: requests that have not ended yet."""

    def __init__(self) -> None:
        self.under_way = 0

    async def generate(
        self, submit: Submit, **_: Any
    ) -> AsyncGenerator[list[Tokens | Finished], None]:
        assert submit.sampling is not None
        self.under_way += 1
        try:
            count = min(MOST_TOKENS, submit.sampling.max_tokens)
            top = submit.sampling.logprobs
            first = FIRST_ID + sum(submit.token_ids) % IDS
            for token_id in range(first, first + count):
                logprobs = None if top is None else [_logprob(token_id, top)]
                yield [Tokens(submit.request_id, [token_id], logprobs, 0)]
            usage = Usage(prompt_tokens=len(submit.token_ids), completion_tokens=count)
            yield [Finished(submit.request_id, "length", usage)]
        finally:
            self.under_way -= 1

    async def score(self, submit: Submit, **_: Any) -> Scored:
        usage = Usage(prompt_tokens=len(submit.token_ids))
        logits = logprobs = tops = None
        if submit.candidates is not None:
            logits = [_of(token_id) for token_id in submit.candidates]
        if submit.score_from is not None:
            scored = submit.token_ids[submit.score_from :]
            logprobs = [_of(token_id) for token_id in scored]
            if submit.score_top:
                tops = [_logprob(token_id, submit.score_top).top for token_id in scored]
        return Scored(submit.request_id, usage, logits, logits, logprobs, tops)

    def pool_tokens(self, *, prefill: bool) -> int | None:
        return None

    def problems(self) -> list[str]:
        return []

    def waiting(self) -> Mapping[tuple[str, str], int]:
        return {}


def _of(token_id: int) -> float:
    return -0.25 - (token_id % 8) / 4


def _logprob(token_id: int, top: int) -> TokenLogprob:
    return TokenLogprob(_of(token_id), [(token_id + by, _of(token_id) - by) for by in range(top)])
