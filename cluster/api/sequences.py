"""Runs the sequences of one generation request and merges what they produce."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from cluster.api.session import Services, Session
from cluster.api.text import Delta, SequenceText
from contracts.messages import Submit
from contracts.requests import Sampling, Usage

CONCURRENT_SEQUENCES = 256  # of one HTTP request; the rest wait their turn here
_MERGE_BUFFER = 64  # deltas; beyond it the producers wait for the client to read


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate: the `index`-th choice of the answer. lists_eos: its end-of-sequence
    token is among the tokens that have log-probabilities."""

    index: int
    submit: Submit
    stops: tuple[str, ...]
    lists_eos: bool = False

    @property
    def patient(self) -> bool:
        """The first choice is what the request is admitted or refused with."""
        return self.index > 0


class Tally:
    """The request's usage: each prompt counts once, however many choices it has."""

    def __init__(self) -> None:
        self._prompts: dict[int, Usage] = {}
        self._completion_tokens = 0

    def add(self, prompt: int, usage: Usage) -> None:
        self._prompts.setdefault(prompt, usage)
        self._completion_tokens += usage.completion_tokens

    def body(self) -> dict[str, object]:
        """The `usage` object of an OpenAI answer."""
        prompt_tokens = sum(usage.prompt_tokens for usage in self._prompts.values())
        cached = sum(usage.cached_tokens for usage in self._prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def with_seed(sampling: Sampling, repetition: int) -> Sampling:
    """`n` choices of one prompt draw from different seeds: seed, seed + 1, ..."""
    if sampling.seed is None or repetition == 0:
        return sampling
    seed = (sampling.seed + repetition + (1 << 63)) % (1 << 64) - (1 << 63)
    return msgspec.structs.replace(sampling, seed=seed)


async def run_choice(
    services: Services, session: Session, choice: Choice, usages: dict[int, Usage]
) -> AsyncGenerator[Delta, None]:
    """The choice's deltas, one per arrival; its usage goes to `usages` when it ends."""
    submit, sampling = choice.submit, choice.submit.sampling
    text = SequenceText(
        services.tokenizer,
        prompt_tokens=len(submit.token_ids),
        stops=choice.stops,
        stops_after=0 if sampling is None else sampling.min_tokens,
        hidden_ids=submit.ending_ids,
        lists_hidden=choice.lists_eos,
    )
    first_s = last_s = 0.0
    async with aclosing(services.backend.generate(submit, patient=choice.patient)) as batches:
        async for batch in batches:
            session.on_token()
            last_s = services.clock()
            first_s = first_s or last_s
            delta = text.push(batch)
            if text.finished:
                usages[choice.index] = text.usage
                session.on_sequence_end(text.usage, first_s, last_s)
            yield delta
            if text.finished:
                return


async def run_choices(
    services: Services, session: Session, choices: Sequence[Choice], usages: dict[int, Usage]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """(choice index, delta) of all choices as they come. The first error ends all of them."""
    if len(choices) == 1:
        async with aclosing(run_choice(services, session, choices[0], usages)) as deltas:
            async for delta in deltas:
                yield choices[0].index, delta
        return
    merged: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue(_MERGE_BUFFER)
    waiting = iter(choices)

    async def work() -> None:
        for choice in waiting:
            async with aclosing(run_choice(services, session, choice, usages)) as deltas:
                async for delta in deltas:
                    await merged.put((choice.index, delta))

    workers = [
        asyncio.ensure_future(work()) for _ in range(min(len(choices), CONCURRENT_SEQUENCES))
    ]
    everything = asyncio.gather(*workers)
    try:
        async with aclosing(_drain(merged, everything)) as items:
            async for item in items:
                yield item
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, everything, return_exceptions=True)


async def _drain(
    merged: asyncio.Queue[tuple[int, Delta]], done: asyncio.Future[list[None]]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Items until `done` is done and nothing is left; raises what `done` raised."""
    getter: asyncio.Future[tuple[int, Delta]] = asyncio.ensure_future(merged.get())
    try:
        while True:
            await asyncio.wait((getter, done), return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                yield getter.result()
                getter = asyncio.ensure_future(merged.get())
            elif merged.empty():
                done.result()
                return
    finally:
        getter.cancel()
