"""The sequences of one request as they come, where it has several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.classification.bounded import map_bounded
from cluster.http.authenticator import with_cache_salt
from cluster.http.body import read_request_body
from cluster.http.checks import check_priority
from cluster.http.echo import Echo, echo
from cluster.http.request_context import DONE, AppState, EventStream, RequestContext, sse
from cluster.http.response_types import TokenUsage
from cluster.http.responses import (
    ChoiceBuilder,
    Deltas,
    Json,
    LogprobsJson,
    UsageTally,
    collect,
    json_list,
    json_object,
    pieces_response,
    response_fields,
)
from cluster.http.schemas import GenerationBody, GenerationOptions
from cluster.http.text import Delta, SequenceText, ShownToken
from contracts.messages import Submit
from contracts.metrics import Pipeline
from contracts.requests import Sampling, Usage
from models.text.tokenizer import Tokenizer

CONCURRENT_SEQUENCES = 256  # of one HTTP request; the rest wait their turn here
_MERGE_BUFFER = 64  # deltas; beyond it the producers wait for the client to read

_Item = tuple[int, Delta]


async def merge_sequences(
    deltas_of: Callable[[int], AsyncGenerator[_Item, None]], count: int
) -> AsyncGenerator[_Item, None]:
    """What `deltas_of` 0 to count - 1 yield. The first error ends all of them."""
    items: asyncio.Queue[_Item] = asyncio.Queue(_MERGE_BUFFER)
    waiting = iter(range(count))

    async def work() -> None:
        for index in waiting:
            async with aclosing(deltas_of(index)) as deltas:
                async for item in deltas:
                    await items.put(item)

    workers = [asyncio.ensure_future(work()) for _ in range(min(count, CONCURRENT_SEQUENCES))]
    everything = asyncio.gather(*workers)
    try:
        async with aclosing(_drain(items, everything)) as drained:
            async for item in drained:
                yield item
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, everything, return_exceptions=True)


async def _drain(
    items: asyncio.Queue[_Item], done: asyncio.Future[list[None]]
) -> AsyncGenerator[_Item, None]:
    """Items until `done` is done and nothing is left; raises what `done` raised."""
    getter: asyncio.Future[_Item] = asyncio.ensure_future(items.get())
    try:
        while True:
            await asyncio.wait((getter, done), return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                yield getter.result()
                getter = asyncio.ensure_future(items.get())
            elif items.empty():
                done.result()
                return
    finally:
        getter.cancel()


CONCURRENT_ECHOES = 64


class GenerationPrompt(msgspec.Struct, frozen=True):
    """text: what `echo` gives back."""

    token_ids: list[int]
    sampling: Sampling
    text: str = ""


class GenerationJob(msgspec.Struct, frozen=True):
    """What a body asks for, checked. lists_eos: a choice's end-of-sequence token is
    among the tokens that have log-probabilities."""

    prompts: list[GenerationPrompt]
    options: GenerationOptions
    echo: bool = False
    lists_eos: bool = False

    @property
    def count(self) -> int:
        return len(self.prompts) * self.options.n

    @property
    def prefill_only(self) -> bool:
        """Whether one pass over each prompt is all of it."""
        return self.options.max_tokens == 0 or all(
            prompt.sampling.max_tokens <= 1 for prompt in self.prompts
        )

    def prompt_of(self, index: int) -> int:
        """Choices are ordered by prompt, then by repetition."""
        return index // self.options.n


class ResponseFormatter(Protocol):
    """prefix: of an answer's id. whole, chunk: names of an answer and of a piece of a stream."""

    prefix: str
    object_type: str
    chunk_type: str

    def logprobs(self) -> LogprobsJson | None:
        """Where those of a choice are collected; None: not wanted."""

    def choice(self, index: int, choice: ChoiceBuilder) -> dict[str, Any]:
        """In a whole answer, but for its log-probabilities."""

    def pieces(self, index: int, delta: Delta) -> Sequence[dict[str, Any]]:
        """In a stream: what each chunk says of the choice."""


Body = TypeVar("Body", bound=GenerationBody)
Check = Callable[[AppState, RequestContext, Body], Awaitable[GenerationJob]]
MakeFormatter = Callable[[Tokenizer, int | None], ResponseFormatter]


async def generation(
    app_state: AppState,
    ctx: RequestContext,
    request: Request,
    kind: type[Body],
    check: Check[Body],
    make_formatter: MakeFormatter,
) -> Response:
    """check: makes a job of a body of this kind, or raises TandemError. word: given how many
    alternatives to each token are to be told; None: no log-probabilities."""
    body = await read_request_body(app_state, ctx, request, kind)
    ctx.set_priority(check_priority(body, default=ctx.priority))
    ctx.caller = with_cache_salt(ctx.caller, body.cache_salt)

    async def respond() -> Response:
        job = await check(app_state, ctx, body)
        if job.prefill_only:
            ctx.pipeline = Pipeline.PREFILL
        formatter = make_formatter(app_state.tokenizer, job.options.sampling.logprobs)
        run = _Run(app_state, ctx, job, formatter)
        if job.options.stream:
            return await EventStream.open(ctx, run.frames())
        return pieces_response(await run.answer())

    return await ctx.run(respond())


class _Run:
    """A job at work: its deltas, as one answer or as a stream of chunks."""

    def __init__(
        self,
        app_state: AppState,
        ctx: RequestContext,
        job: GenerationJob,
        formatter: ResponseFormatter,
    ) -> None:
        self._app_state = app_state
        self._ctx = ctx
        self._job = job
        self._formatter = formatter
        self._usages: dict[int, Usage] = {}

    def _header(self, kind: str) -> dict[str, Any]:
        return response_fields(self._formatter.prefix, kind, self._app_state.model.name)

    async def answer(self) -> Json:
        formatter, account = self._formatter, self._ctx.account
        choices = [ChoiceBuilder(formatter.logprobs(), account) for _ in range(self._job.count)]
        await collect(self._deltas(), choices)
        result = [
            json_object(formatter.choice(index, choice), {"logprobs": choice.logprobs})
            for index, choice in enumerate(choices)
        ]
        head = {**self._header(formatter.object_type), "usage": self._usage()}
        return json_object(head, {"choices": json_list(result)})

    async def frames(self) -> AsyncGenerator[bytes, None]:
        head, formatter = self._header(self._formatter.chunk_type), self._formatter
        usage = {"usage": None} if self._job.options.include_usage else {}
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                for piece in formatter.pieces(index, delta):
                    yield sse({**head, "choices": [piece], **usage})
        if usage:
            yield sse({**head, "choices": [], "usage": self._usage()})
        yield DONE

    def _usage(self) -> TokenUsage:
        tally = UsageTally()
        for index, usage in sorted(self._usages.items()):
            tally.add(self._job.prompt_of(index), usage)
        return tally.result()

    def _deltas(self) -> Deltas:
        return self._echoed() if self._job.echo else self._generated()

    async def _echoed(self) -> Deltas:
        """Each choice's echo first, then what is generated, its tokens shifted behind the echo."""
        job = self._job
        echoes = await map_bounded(self._echo, range(len(job.prompts)), CONCURRENT_ECHOES)
        for index in range(job.count):
            async for delta in echoes[job.prompt_of(index)].deltas():
                yield index, delta
        if job.options.max_tokens == 0:
            return
        async with aclosing(self._generated()) as generated:
            async for index, delta in generated:
                yield index, _shifted(delta, len(job.prompts[job.prompt_of(index)].text))

    def _generated(self) -> Deltas:
        count = self._job.count
        return self._sequence(0) if count == 1 else merge_sequences(self._sequence, count)

    async def _sequence(self, index: int) -> Deltas:
        """One delta per arrival; the sequence's usage is known when it ends. The first sequence is
        what the request is admitted or refused with."""
        app_state, ctx, submit = self._app_state, self._ctx, self._submit(index)
        text = SequenceText(
            app_state.tokenizer,
            prompt_tokens=len(submit.token_ids),
            stops=self._job.options.stops,
            stops_after=submit.sampling.min_tokens if submit.sampling else 0,
            hidden_ids=submit.end_token_ids,
            lists_hidden=self._job.lists_eos,
        )
        first_s = last_s = 0.0
        async with aclosing(app_state.backend.generate(submit, wait_for_slot=index > 0)) as batches:
            async for batch in batches:
                ctx.on_token()
                last_s = app_state.clock()
                first_s = first_s or last_s
                delta = text.push(batch)
                if text.finished:
                    self._usages[index] = text.usage
                    ctx.on_sequence_end(text.usage, first_s, last_s)
                yield index, delta
                if text.finished:
                    return

    def _submit(self, index: int) -> Submit:
        options = self._job.options
        prompt = self._job.prompts[self._job.prompt_of(index)]
        return Submit(
            request_id=0,
            token_ids=prompt.token_ids,
            sampling=_with_seed(prompt.sampling, index % options.n),
            priority=options.priority,
            eos_token_ids=list(self._app_state.model.eos_token_ids),
            caller=self._ctx.caller,
        )

    async def _echo(self, number: int) -> Echo:
        """The echo of prompt `number`; its usage counts where nothing is generated after it."""
        options = self._job.options
        prompt = self._job.prompts[number]
        echoed = await echo(
            *(self._app_state, prompt.text, prompt.token_ids, options, self._ctx.caller),
            wait_for_slot=number > 0,
        )
        if options.max_tokens == 0:
            self._ctx.on_token()
            self._ctx.on_sequence_end(echoed.usage, 0.0, 0.0)
            self._usages[number * options.n] = echoed.usage
        return echoed


def _shifted(delta: Delta, characters: int) -> Delta:
    tokens = [ShownToken(t.token_id, t.offset + characters, t.logprob) for t in delta.tokens]
    return msgspec.structs.replace(delta, tokens=tokens)


def _with_seed(sampling: Sampling, repetition: int) -> Sampling:
    """`n` choices of one prompt draw from different seeds: seed, seed + 1, ..."""
    if sampling.seed is None or repetition == 0:
        return sampling
    seed = (sampling.seed + repetition + (1 << 63)) % (1 << 64) - (1 << 63)
    return msgspec.structs.replace(sampling, seed=seed)
